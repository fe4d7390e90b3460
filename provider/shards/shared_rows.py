"""Rows in memory that two processes share: written once by one, read in place by the other.

The owner makes it larger on demand and tells the other by how much with the message about the rows; anonymous memory
(memfd_create), so that nothing is left behind however the processes end.
"""

from __future__ import annotations

import mmap
import os

import torch

_LEAST_BYTES = 1 << 16
KEPT_BYTES = 64 << 20
"""What a larger request needed is given back after it."""


class SharedRows:
    """One end. Not safe under threads, nor between the ends: whoever has the last message has the rows."""

    def __init__(self, descriptor: int, num_bytes: int = 0) -> None:
        """Args: descriptor: of the memory, this object's from now on; num_bytes: to begin with, at the owner's end."""
        self.descriptor = descriptor
        self.num_bytes = 0
        self._map: mmap.mmap | None = None
        if num_bytes:
            self.hold(num_bytes)

    @classmethod
    def create(cls, num_bytes: int) -> SharedRows:
        """The owner's end of new memory."""
        return cls(os.memfd_create("veilbase-rows", os.MFD_CLOEXEC), num_bytes)

    def hold(self, num_bytes: int) -> None:
        """Makes room, by the owner."""
        if num_bytes > self.num_bytes:
            wanted = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
            os.ftruncate(self.descriptor, wanted)
            self.follow(wanted)

    def give_back(self) -> None:
        """By the owner, when nobody looks at the rows any more: keeps no more than is usual."""
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
        """Shape (num_rows, cols), four-byte numbers, in place.

        Raises:
            ValueError: there is no room for so many.
        """
        if num_rows * cols == 0:
            return torch.empty(num_rows, cols, dtype=dtype)
        if self._map is None:
            raise ValueError("no memory is mapped")
        return torch.frombuffer(self._map, dtype=dtype, count=num_rows * cols).view(num_rows, cols)

    def close(self) -> None:
        """Lets it go."""
        self._map = None
        os.close(self.descriptor)
