"""This module shares GPU memory between processes: it makes an allocation by the CUDA driver's functions for virtual
memory, exports it as a file descriptor or imports one, maps it, and gives views of it as torch tensors.

torch shares memory of its own allocator only, whose blocks hold other tensors too. A file descriptor is used, and not
CUDA's older IPC handles: the memory stays whole as long as either process maps it, whatever the other one frees, and
only a process that was sent the descriptor can map it. `Areas` shares out a window's bytes among the requests of one
stream.

Guarantees: an error of the driver is raised as `DriverError` with the driver's number; while one is raised, errors of
undoing what was done before are not. This module does not load the driver at import. The memory stays mapped as long as
any tensor that views it exists, whichever end closes first, and what the device was still told to do is done before it
is unmapped. A view never goes beyond the allocation. No two requests have an area in common until the first one's is
given back; all threads may call `Areas`.

Signatures and structures are those of cuda.h (CUDA 13.1), against which the tests compile a stand-in. Of GPUs it was
run on one H100, with driver 580.159.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import logging
import os
import struct
import threading
from contextlib import AbstractContextManager
from ctypes import POINTER, Structure, byref, c_char, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_ushort, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

from wire.errors import MalformedFrame
from wire.frame import ITEM_BYTES

LIBRARY = "libcuda.so.1"
UUID_BYTES = 16
_INVALID, _OUT_OF_MEMORY, _NOT_FOUND, _NOT_SUPPORTED = 1, 2, 500, 801
_PINNED, _ON_DEVICE, _BY_DESCRIPTOR, _READ_WRITE, _MINIMUM = 1, 1, 1, 3, 0
CAN_MAP, CAN_EXPORT = 102, 103
"""The attributes that a device needs for windows: CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED and
CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED."""


class Location(Structure):
    """Is CUmemLocation: a kind of place (1 for a device), and its number."""

    _fields_ = [("type", c_int), ("id", c_int)]


class AllocationFlags(Structure):
    """Is the structure `allocFlags` in CUmemAllocationProp; all of it stays zero here."""

    _fields_ = [
        ("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4),
    ]  # fmt: skip


class AllocationProperties(Structure):
    """Is CUmemAllocationProp: what memory to allocate, where, and how it may be exported."""

    _fields_ = [
        ("type", c_int), ("handle_types", c_int), ("location", Location), ("win32", c_void_p),
        ("flags", AllocationFlags),
    ]  # fmt: skip


class AccessDescription(Structure):
    """Is CUmemAccessDesc: which device may use a range of addresses, and how."""

    _fields_ = [("location", Location), ("flags", c_int)]


class Uuid(Structure):
    """Is CUuuid: the 16 bytes that name a GPU, or a part of one (MIG), in every process alike."""

    _fields_ = [("bytes", c_char * UUID_BYTES)]


_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetUuid_v2": [POINTER(Uuid), c_int],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuMemGetAllocationGranularity": [POINTER(c_size_t), POINTER(AllocationProperties), c_int],
    "cuMemCreate": [POINTER(c_ulonglong), c_size_t, POINTER(AllocationProperties), c_ulonglong],
    "cuMemRelease": [c_ulonglong],
    "cuMemExportToShareableHandle": [c_void_p, c_ulonglong, c_int, c_ulonglong],
    "cuMemImportFromShareableHandle": [POINTER(c_ulonglong), c_void_p, c_int],
    "cuMemGetAllocationPropertiesFromHandle": [POINTER(AllocationProperties), c_ulonglong],
    "cuMemAddressReserve": [POINTER(c_ulonglong), c_size_t, c_size_t, c_ulonglong, c_ulonglong],
    "cuMemAddressFree": [c_ulonglong, c_size_t],
    "cuMemMap": [c_ulonglong, c_size_t, c_size_t, c_ulonglong, c_ulonglong],
    "cuMemSetAccess": [c_ulonglong, c_size_t, POINTER(AccessDescription), c_size_t],
    "cuMemUnmap": [c_ulonglong, c_size_t],
}


class DriverError(RuntimeError):
    """Says that a function of the driver failed.

    Attributes:
        function: the function's name.
        code: its CUresult, such as 2 for a lack of memory.
    """

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} failed with CUDA error {code}")
        self.function, self.code = function, code

    @property
    def is_out_of_memory(self) -> bool:
        return self.code == _OUT_OF_MEMORY


class Driver:
    """Holds the loaded driver and one device."""

    def __init__(self, ordinal: int, library: str = LIBRARY) -> None:
        """Loads the driver, and checks that the device can share memory.

        Args:
            ordinal: the device's number in this process, as in `cuda:N`.
            library: the driver's file; tests name a stand-in.

        Raises:
            DriverError: the device cannot share memory, or the driver fails.
            OSError: the driver cannot be loaded.
        """
        self._library = ctypes.CDLL(library)
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name, None)
            if function is None:
                raise DriverError(name, _NOT_FOUND)
            function.argtypes, function.restype = arguments, c_int
        self.ordinal, self._device = ordinal, c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", byref(self._device), ordinal)
        for attribute in (CAN_MAP, CAN_EXPORT):
            value = c_int()
            self._call("cuDeviceGetAttribute", byref(value), attribute, self._device)
            if not value.value:
                raise DriverError("cuDeviceGetAttribute", _NOT_SUPPORTED)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise DriverError(name, code)

    def uuid(self) -> bytes:
        """Returns the 16 bytes that name the GPU, or the part of one that this process sees."""
        uuid = Uuid()
        self._call("cuDeviceGetUuid_v2", byref(uuid), self._device)
        return bytes(memoryview(uuid))

    def rounded(self, size: int) -> int:
        """Returns the least number of bytes, not below `size`, that an allocation can have."""
        granularity, wanted = c_size_t(), self._properties()
        self._call("cuMemGetAllocationGranularity", byref(granularity), byref(wanted), _MINIMUM)
        return -(-size // granularity.value) * granularity.value

    def create(self, size: int) -> int:
        """Allocates `size` bytes, a number that `rounded` returned, and returns the allocation's handle."""
        handle, wanted = c_ulonglong(), self._properties()
        self._call("cuMemCreate", byref(handle), size, byref(wanted), 0)
        return handle.value

    def export(self, handle: int) -> int:
        """Returns a new file descriptor that stands for an allocation; the caller closes it."""
        descriptor = c_int(-1)
        self._call("cuMemExportToShareableHandle", byref(descriptor), handle, _BY_DESCRIPTOR, 0)
        os.set_inheritable(descriptor.value, False)
        return descriptor.value

    def import_(self, descriptor: int) -> int:
        """Returns a handle of the allocation that another process exported. The descriptor stays the caller's.

        Raises:
            DriverError: the descriptor stands for nothing, or for memory of another device.
        """
        handle, found = c_ulonglong(), AllocationProperties()
        self._call("cuMemImportFromShareableHandle", byref(handle), c_void_p(descriptor), _BY_DESCRIPTOR)
        try:
            self._call("cuMemGetAllocationPropertiesFromHandle", byref(found), handle)
            if (found.location.type, found.location.id) != (_ON_DEVICE, self._device.value):
                raise DriverError("cuMemGetAllocationPropertiesFromHandle", _INVALID)
        except DriverError:
            self._library.cuMemRelease(handle)
            raise
        return handle.value

    def release(self, handle: int) -> None:
        """Gives a handle back. The memory is freed once nothing maps it and no handle or descriptor is left."""
        self._call("cuMemRelease", handle)

    def map(self, handle: int, size: int) -> int:
        """Maps a whole allocation, which the device may then read and write, and returns its address.

        Raises:
            DriverError: the driver refuses, as it does for more bytes than the allocation has; nothing is mapped then.
        """
        address = c_ulonglong()
        self._call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
        try:
            self._call("cuMemMap", address, size, 0, handle, 0)
            try:
                access = AccessDescription(Location(_ON_DEVICE, self._device.value), _READ_WRITE)
                self._call("cuMemSetAccess", address, size, byref(access), 1)
            except DriverError:
                self._library.cuMemUnmap(address, size)
                raise
        except DriverError:
            self._library.cuMemAddressFree(address, size)
            raise
        return address.value

    def unmap(self, address: int, size: int) -> None:
        """Takes back what `map` did. No product or copy may use the memory any more."""
        self._call("cuMemUnmap", address, size)
        self._call("cuMemAddressFree", address, size)

    def _properties(self) -> AllocationProperties:
        return AllocationProperties(_PINNED, _BY_DESCRIPTOR, Location(_ON_DEVICE, self._device.value), None)


ALIGNMENT = 256
"""Areas begin at multiples of so many bytes, as torch's own allocations do."""
_PLACE = struct.Struct("<QQ")
PLACE_BYTES = _PLACE.size


@dataclass(frozen=True)
class Area:
    """Holds the place of one request in a window.

    Attributes:
        rows_at, reply_at: the bytes at which its rows and its reply begin.
        num_bytes: the bytes of both, from `rows_at` on; not sent.
    """

    rows_at: int
    reply_at: int
    num_bytes: int = 0

    def pack(self) -> bytes:
        """Returns the payload of a REQUEST whose rows are in the window."""
        return _PLACE.pack(self.rows_at, self.reply_at)

    @classmethod
    def unpack(cls, payload: bytes | memoryview) -> Area:
        """Returns the area that a payload names. Raises MalformedFrame if the payload has another length."""
        if len(payload) != PLACE_BYTES:
            raise MalformedFrame("a request in a window names two places")
        return cls(*_PLACE.unpack(payload))


class Areas:
    """Keeps which bytes of a window are free."""

    def __init__(self, size: int) -> None:
        """Begins with all `size` bytes free."""
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, size)]
        """Free ranges as (start, end), in order; no two of them touch."""

    def take(self, row_bytes: int, reply_bytes: int) -> Area | None:
        """Returns the first free area for the rows and the reply of a request; None if there is none."""
        first = _aligned(row_bytes)
        needed = first + _aligned(reply_bytes)
        with self._lock:
            for index, (start, end) in enumerate(self._free):
                if end - start >= needed:
                    self._free[index : index + 1] = [(start + needed, end)] if end - start > needed else []
                    return Area(start, start + first, needed)
        return None

    def give_back(self, area: Area) -> None:
        """Frees an area that `take` returned, once."""
        start, end = area.rows_at, area.rows_at + area.num_bytes
        with self._lock:
            index = bisect.bisect(self._free, (start, end))
            if index < len(self._free) and self._free[index][0] == end:
                end = self._free.pop(index)[1]
            if index and self._free[index - 1][1] == start:
                index -= 1
                start = self._free.pop(index)[0]
            self._free.insert(index, (start, end))

    @property
    def free_bytes(self) -> int:
        """Returns how many bytes are free, in ranges of any size."""
        with self._lock:
            return sum(end - start for start, end in self._free)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


_COPIED = -1
"""Stands in place of a CUDA error where torch has copied memory that it should only have viewed."""
_LOGGER = logging.getLogger(__name__)


class SharedMemory:
    """Holds one mapped allocation. It is unmapped when this object and all tensors that view it are gone."""

    def __init__(self, driver: Driver, device: torch.device, handle: int, size: int) -> None:
        """Maps an allocation, and gives its handle back; callers use `allocate` or `import_`.

        Args:
            driver: the driver and the device that has the memory.
            device: the same device as torch names it; `cpu` for the tests' stand-in of the driver, whose memory is the
                host's.
            handle: the allocation, which this object gives back also if mapping fails.
            size: its bytes.
        """
        try:
            self._mapping = _Mapping(driver, device, driver.map(handle, size), size)
        finally:
            driver.release(handle)
        self.device, self.size = device, size
        with torch.inference_mode(False):  # Else no later call outside of that mode could write here.
            self._numbers = _tensor(self._mapping, device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def matrix(self, offset: int, num_rows: int, cols: int) -> torch.Tensor:
        """Returns a view of int32 numbers, shape (num_rows, cols), that begins at the byte `offset`.

        Raises:
            ValueError: the offset is no multiple of 4, or the view would go beyond the memory.
        """
        end = offset + num_rows * cols * ITEM_BYTES
        if offset % ITEM_BYTES or min(offset, num_rows, cols) < 0 or end > self.size:
            raise ValueError("a view beyond the shared memory")
        return self._numbers[offset // ITEM_BYTES : end // ITEM_BYTES].view(num_rows, cols)

    def write(self, offset: int, numbers: torch.Tensor) -> None:
        """Copies a matrix of int32 numbers to the byte `offset`, and waits until the other process can read it; see
        `matrix` for errors. What makes the numbers must be done already, since the copy has a stream of its own."""
        with self._copying():
            self.matrix(offset, *numbers.shape).copy_(numbers)
        self.synchronize()

    def read(self, offset: int, num_rows: int, cols: int, stays: bool = False) -> torch.Tensor:
        """Returns a copy of a matrix, in the CPU's memory or with `stays` on the device; see `matrix`."""
        with self._copying():
            matrix = self.matrix(offset, num_rows, cols)
            copied = matrix.clone() if stays else matrix.to("cpu", copy=True)
        self.synchronize()
        if not copied.is_cpu:
            copied.record_stream(torch.cuda.current_stream(copied.device))  # It was made on another stream.
        return copied

    def fill_with_zeros(self) -> None:
        """Overwrites all of the memory, and waits until that is done."""
        with self._copying():
            self._numbers.zero_()
        self.synchronize()

    def synchronize(self) -> None:
        """Waits until the copies that `write`, `read` and `fill_with_zeros` have started are done."""
        if self._stream is not None:
            self._stream.synchronize()

    def _copying(self) -> AbstractContextManager[object]:
        """Returns a context in which copies run on a stream of their own: they wait for no other work of the device."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def allocate(driver: Driver, device: torch.device, size: int) -> tuple[SharedMemory, int]:
    """Allocates memory that can be shared, filled with zeros.

    Args:
        driver, device: see `SharedMemory`.
        size: the least number of bytes; it is rounded up to what the device allocates, 2 MiB on most.

    Returns:
        The memory, and a file descriptor that stands for it, which the caller closes.

    Raises:
        DriverError: the device has too little memory, or the driver fails.
    """
    size = driver.rounded(size)
    handle = driver.create(size)
    try:
        descriptor = driver.export(handle)
    except DriverError:
        driver.release(handle)
        raise
    try:
        memory = SharedMemory(driver, device, handle, size)
        memory.fill_with_zeros()  # What another process left there is nobody's business.
    except BaseException:
        os.close(descriptor)
        raise
    return memory, descriptor


def import_(driver: Driver, device: torch.device, descriptor: int, size: int) -> SharedMemory:
    """Maps memory that another process has allocated.

    Args:
        driver, device: see `SharedMemory`.
        descriptor: what the other process sent; it stays the caller's to close.
        size: the number of bytes that the other process named.

    Raises:
        DriverError: the descriptor does not stand for so many bytes of this device's memory.
    """
    return SharedMemory(driver, device, driver.import_(descriptor), size)


class _Mapping:
    """Holds an address range; the range is unmapped when the last reference to this object is gone."""

    def __init__(self, driver: Driver, device: torch.device, address: int, size: int) -> None:
        self._driver, self._device, self.address, self.size, self._pid = driver, device, address, size, os.getpid()
        self.__cuda_array_interface__ = {
            "shape": (size // ITEM_BYTES,), "typestr": "<i4", "data": (address, False), "version": 2,
        }  # fmt: skip

    def __del__(self) -> None:
        if os.getpid() != self._pid:
            return  # In a forked child CUDA does not work, and the mapping is the parent's.
        try:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # This also gives the thread a context, whichever thread it is.
            self._driver.unmap(self.address, self.size)
        except Exception as exc:  # noqa: BLE001 - the device may be lost, or Python may be at its end
            _LOGGER.warning("shared memory could not be unmapped: %s", getattr(exc, "code", type(exc).__name__))


def _tensor(mapping: _Mapping, device: torch.device) -> torch.Tensor:
    """Returns all numbers of a mapping as a tensor, which keeps the mapping."""
    if device.type == "cuda":
        numbers = torch.as_tensor(mapping, device=device)
        if numbers.data_ptr() != mapping.address or numbers.device != device:
            raise DriverError("torch.as_tensor", _COPIED)  # A copy would be shared with nobody.
        return numbers
    kind: Any = type("_Block", (ctypes.c_ubyte * mapping.size,), {})
    block = kind.from_address(mapping.address)
    block.mapping = mapping
    return torch.frombuffer(block, dtype=torch.int32)
