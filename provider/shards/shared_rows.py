"""Rows in memory that two processes share: one process writes them once, the other reads them in place.

The owner enlarges the memory on demand and tells the other by how much with the message about the rows. The memory is
anonymous (memfd_create), so that nothing is left behind however the processes end.
"""

from __future__ import annotations

import mmap
import os

import torch

_LEAST_BYTES = 1 << 16
KEPT_BYTES = 64 << 20
"""Most bytes that are kept; what a larger request needed is given back after it."""


class SharedRows:
    """One end. It is not safe under threads, nor between the ends: the end that has the last message has the rows."""

    def __init__(self, descriptor: int, num_bytes: int = 0) -> None:
        """Args: descriptor: the memory's, this object's from now on; num_bytes: the size to begin with, at the owner's
        end."""
        self.descriptor = descriptor
        self.num_bytes = 0
        self._map: mmap.mmap | None = None
        if num_bytes:
            self.hold(num_bytes)

    @classmethod
    def create(cls, num_bytes: int) -> SharedRows:
        """Makes the owner's end of new memory."""
        return cls(os.memfd_create("veilbase-rows", os.MFD_CLOEXEC), num_bytes)

    def hold(self, num_bytes: int) -> None:
        """Makes room; the owner calls this."""
        if num_bytes > self.num_bytes:
            wanted = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
            os.ftruncate(self.descriptor, wanted)
            self.follow(wanted)

    def give_back(self) -> None:
        """Keeps no more than `KEPT_BYTES`; the owner calls this when neither end looks at the rows any more."""
        if self.num_bytes > KEPT_BYTES:
            self._map = None
            os.ftruncate(self.descriptor, KEPT_BYTES)
            self.follow(KEPT_BYTES)

    def follow(self, num_bytes: int) -> None:
        """Maps the memory at the size that the owner gave it."""
        if num_bytes != self.num_bytes:
            self._map = mmap.mmap(self.descriptor, num_bytes)
            self.num_bytes = num_bytes

    def view(self, num_rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a view of the memory, shape (num_rows, cols), of four-byte numbers.

        Raises:
            ValueError: there is no room for so many.
        """
        if num_rows * cols == 0:
            return torch.empty(num_rows, cols, dtype=dtype)
        if self._map is None:
            raise ValueError("no memory is mapped")
        return torch.frombuffer(self._map, dtype=dtype, count=num_rows * cols).view(num_rows, cols)

    def close(self) -> None:
        """Unmaps and closes the memory."""
        self._map = None
        os.close(self.descriptor)
