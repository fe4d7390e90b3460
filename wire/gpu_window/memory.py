"""This module holds a shared allocation of a GPU, and gives views of it as torch tensors.

Guarantees: the memory stays mapped as long as any tensor that views it exists, whichever end closes first, and what the
device was still told to do is done before it is unmapped. A view never goes beyond the allocation.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from contextlib import AbstractContextManager
from typing import Any

import torch

from wire.frame import ITEM_BYTES
from wire.gpu_window.driver import Driver, DriverError

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
