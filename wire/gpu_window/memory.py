"""This module holds a shared allocation of a GPU, and gives views of it as torch tensors.

Guarantees: the memory stays mapped as long as any tensor that views it exists, so a product that still runs never reads
an address that is gone, whichever end closes first. A view never goes beyond the allocation.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

import torch

from wire.frame import ITEM_BYTES
from wire.gpu_window.driver import Driver, DriverError


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
            self._mapping = _Mapping(driver, driver.map(handle, size), size)
        finally:
            driver.release(handle)
        self.device, self.size = device, size
        self._numbers = _tensor(self._mapping, device)

    def matrix(self, offset: int, num_rows: int, cols: int) -> torch.Tensor:
        """Returns a view of int32 numbers, shape (num_rows, cols), that begins at the byte `offset`.

        Raises:
            ValueError: the offset is no multiple of 4, or the view would go beyond the memory.
        """
        end = offset + num_rows * cols * ITEM_BYTES
        if offset % ITEM_BYTES or min(offset, num_rows, cols) < 0 or end > self.size:
            raise ValueError("a view beyond the shared memory")
        return self._numbers[offset // ITEM_BYTES : end // ITEM_BYTES].view(num_rows, cols)

    def synchronize(self) -> None:
        """Waits until the copies to and from this memory that this thread has started are done, so that the other
        process may use the memory."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


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
        memory.matrix(0, 1, size // ITEM_BYTES).zero_()  # What another process left there is nobody's business.
        memory.synchronize()
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

    def __init__(self, driver: Driver, address: int, size: int) -> None:
        self._driver, self.address, self.size = driver, address, size
        self.__cuda_array_interface__ = {
            "shape": (size // ITEM_BYTES,), "typestr": "<i4", "data": (address, False), "version": 2,
        }  # fmt: skip

    def __del__(self) -> None:
        with contextlib.suppress(DriverError):  # The device may be lost, and with it the memory.
            self._driver.unmap(self.address, self.size)


def _tensor(mapping: _Mapping, device: torch.device) -> torch.Tensor:
    """Returns all numbers of a mapping as a tensor, which keeps the mapping."""
    if device.type == "cuda":
        return torch.as_tensor(mapping, device=device)
    kind: Any = type("_Block", (ctypes.c_ubyte * mapping.size,), {})
    block = kind.from_address(mapping.address)
    block.mapping = mapping
    return torch.frombuffer(block, dtype=torch.int32)
