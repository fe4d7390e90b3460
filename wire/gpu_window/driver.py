"""This module calls the CUDA driver's functions for virtual memory: it makes an allocation of GPU memory, exports it as
a file descriptor, imports one, and maps it. torch shares memory of its own allocator only, whose blocks hold other
tensors too.

A file descriptor is used, and not CUDA's older IPC handles: the memory stays whole as long as either process maps it,
whatever the other one frees, and only a process that was sent the descriptor can map it.

Guarantees: an error of the driver is raised as `DriverError` with the driver's number; while one is raised, errors of
undoing what was done before are not. Nothing is loaded at import. Signatures and structures are those of cuda.h (CUDA
13.1), against which the tests compile a stand-in. Of GPUs it was run on one H100, with driver 580.159.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, byref, c_char, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_ushort, c_void_p
from typing import Any

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
        """Returns whether the device had too little free memory."""
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
