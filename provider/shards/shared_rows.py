"""Holds rows in memory that two processes share: one process writes the rows, and the other reads them in place.

One process, the owner, enlarges the memory on demand. The owner sends the new size with the message about the rows. The
memory is anonymous (memfd_create), so nothing is left behind, however the processes end.
"""

from __future__ import annotations

import mmap
import os

import torch

_LEAST_BYTES = 1 << 16
KEPT_BYTES = 64 << 20
"""The limit in bytes on the shared memory that is kept between requests; memory above the limit is freed after a
request."""


class SharedRows:
    """Maps the shared memory in one of the two processes. This class is not thread-safe. The processes must take turns:
    only the process that received the last message may use the rows."""

    def __init__(self, descriptor: int, num_bytes: int = 0) -> None:
        """Takes over the file descriptor of shared memory. The owner also maps the memory; the other process maps it
        later, by `follow`.

        Args:
            descriptor: the memory's file descriptor, which `close` closes.
            num_bytes: for the owner, the smallest size that the memory may have at the start; 0 for the other process.
        """
        self.descriptor = descriptor
        self.num_bytes = 0
        self._map: mmap.mmap | None = None
        if num_bytes:
            self.hold(num_bytes)

    @classmethod
    def create(cls, num_bytes: int) -> SharedRows:
        """Creates new shared memory, and returns the object by which its owner uses the memory."""
        return cls(os.memfd_create("veilbase-rows", os.MFD_CLOEXEC), num_bytes)

    def hold(self, num_bytes: int) -> None:
        """Enlarges the memory to at least `num_bytes`; only the owner may call this."""
        if num_bytes > self.num_bytes:
            wanted = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
            os.ftruncate(self.descriptor, wanted)
            self.follow(wanted)

    def give_back(self) -> None:
        """Shrinks the memory to `KEPT_BYTES` if the memory is larger. Only the owner may call this, once neither
        process uses the rows any more."""
        if self.num_bytes > KEPT_BYTES:
            self._map = None
            os.ftruncate(self.descriptor, KEPT_BYTES)
            self.follow(KEPT_BYTES)

    def follow(self, num_bytes: int) -> None:
        """Maps the memory again if the owner has changed the memory's size to `num_bytes`."""
        if num_bytes != self.num_bytes:
            self._map = mmap.mmap(self.descriptor, num_bytes)
            self.num_bytes = num_bytes

    def view(self, num_rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a view of the memory, shape (num_rows, cols); `dtype` must have four bytes.

        Raises:
            ValueError: the memory is too small.
        """
        if num_rows * cols == 0:
            return torch.empty(num_rows, cols, dtype=dtype)
        if self._map is None:
            raise ValueError("no memory is mapped")
        return torch.frombuffer(self._map, dtype=dtype, count=num_rows * cols).view(num_rows, cols)

    def close(self) -> None:
        """Unmaps the shared memory and closes its file descriptor."""
        self._map = None
        os.close(self.descriptor)
