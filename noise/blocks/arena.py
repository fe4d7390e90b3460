"""This module gives memory for mask rows and their effects, and uses it again when no tensor refers to it any more.

On many machines the first touch of a page takes longer than the mask that is written to it: 2 to 3 µs for 1,024 numbers
in a virtual machine whose host takes free pages back, where making them takes about 2 µs. malloc returns large blocks
to the system when they are freed, or keeps them where nothing else fits, as its own rules have it; a run's memory then
depends on these rules. An arena takes memory from the system in regions, hands out parts of them and keeps a free
region only until the next one is free.

Guarantees: a part is used again only after the last tensor that refers to it is gone, which Python's and torch's
reference counts decide. So no row that is waiting to be sent, and no effect that is waiting for its reply, is ever
overwritten. The memory of an arena is not in a core dump, where the system has this rule (Linux).

Not guaranteed: that a part is empty. It is handed out as it was left, and what was left there is secret: effects and
mask rows that were used, which would unmask recorded traffic, or rows that were dropped unused. Whoever asks for a
part must overwrite all of it before any of it is read. A forked child has a copy of the memory, as of all other memory
of the process, and an arena of its own.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from wire.ring.kernels import EFFECT_BYTES
from wire.ring.widths import pack_effect

_REGION_BYTES = 32 << 20
"""The least size of a region. It is far above a block of one layer (1 to 6 MB on SmolLM2), so that little is left over,
and far below a pool."""
_HUGE_BYTES = 2 << 20
"""The size of a huge page on x86-64 and on most other machines. Regions begin at a multiple of it: a first touch of 2
MiB at once took a sixth of the time of 512 first touches."""
_LINE_BYTES = 64
"""Parts begin at a multiple of a cache line, which the kernels need to write past the caches."""
_LEAST_BYTES = 64 << 10
"""Smaller parts come from malloc, which reuses them well."""
_ADVICE = ("MADV_HUGEPAGE", "MADV_DONTDUMP")


class FreeRanges:
    """Keeps the ranges of a space that are free, in order and never adjacent. It is not safe under threads."""

    def __init__(self, size: int) -> None:
        """Makes a space of `size` bytes, all free."""
        self.size = size
        self._ranges = [(0, size)] if size > 0 else []

    @property
    def is_whole(self) -> bool:
        """Returns whether all of the space is free."""
        return self._ranges == [(0, self.size)]

    def fitting(self, num_bytes: int) -> tuple[int, int] | None:
        """Returns the size and the start of the smallest free range that is large enough; None if there is none."""
        return min(((stop - start, start) for start, stop in self._ranges if stop - start >= num_bytes), default=None)

    def take(self, size: int, start: int, num_bytes: int) -> None:
        """Takes the first `num_bytes` of a free range, which `fitting` has returned."""
        at = bisect.bisect_left(self._ranges, (start, 0))
        self._ranges[at : at + 1] = [(start + num_bytes, start + size)] if size > num_bytes else []

    def give_back(self, start: int, stop: int) -> None:
        """Makes a range free that was taken."""
        at = bisect.bisect_left(self._ranges, (start, 0))
        first, last = at, at
        if at > 0 and self._ranges[at - 1][1] == start:
            first, start = at - 1, self._ranges[at - 1][0]
        if at < len(self._ranges) and self._ranges[at][0] == stop:
            last, stop = at + 1, self._ranges[at][1]
        self._ranges[first:last] = [(start, stop)]


class _Region:
    """Holds one mapping, and which ranges of it are free."""

    def __init__(self, num_bytes: int) -> None:
        size = -(-num_bytes // _HUGE_BYTES) * _HUGE_BYTES
        if hasattr(mmap, "MAP_ANONYMOUS"):
            area = mmap.mmap(-1, size + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            area = mmap.mmap(-1, size + _HUGE_BYTES)
        for advice in _ADVICE:
            with contextlib.suppress(AttributeError, OSError):  # The system does not have this rule.
                area.madvise(getattr(mmap, advice))
        whole = np.frombuffer(area, dtype=np.uint8)
        begin = -whole.ctypes.data % _HUGE_BYTES
        self.bytes = whole[begin : begin + size]
        self.free = FreeRanges(size)


class Arena:
    """Gives memory to tensors and takes it back when they are gone. It is safe under threads."""

    def __init__(self) -> None:
        """Makes an arena without memory."""
        self._lock = threading.Lock()
        self._regions: list[_Region] = []
        self._returned: deque[tuple[_Region, int, int]] = deque()

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all regions, whether in use or not."""
        with self._lock:
            return sum(region.bytes.size for region in self._regions)

    def rows(self, num_rows: int, features: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Returns memory for rows, whose contents are undefined: the caller must write all of it before it reads any.

        Returns:
            a tensor of this type, shape (num_rows, features), CPU, contiguous; not an inference tensor.

        Raises:
            MemoryError: the system has no more memory.
        """
        row_bytes = features * dtype.itemsize
        num_bytes = -(-num_rows * row_bytes // _LINE_BYTES) * _LINE_BYTES
        with torch.inference_mode(False):
            if num_bytes < _LEAST_BYTES:
                return torch.empty(num_rows, features, dtype=dtype, device="cpu")
            region, start = self._take(num_bytes)
            part = region.bytes[start : start + num_rows * row_bytes]
            # The tensor holds the array, and every tensor that shares its memory holds it, too.
            made = torch.from_numpy(part).view(dtype).view(num_rows, features)
            weakref.finalize(part, self._returned.append, (region, start, start + num_bytes)).atexit = False
            return made

    def _take(self, num_bytes: int) -> tuple[_Region, int]:
        with self._lock:
            self._collect()
            found = [(*fit, region) for region in self._regions if (fit := region.free.fitting(num_bytes)) is not None]
            if not found:
                try:
                    region = _Region(max(num_bytes, _REGION_BYTES))
                except (OSError, OverflowError, ValueError):
                    raise MemoryError(f"no memory for {num_bytes / 1e6:.0f} MB of masks") from None
                self._regions.append(region)
                found.append((region.bytes.size, 0, region))
            # The smallest range that is large enough, of all regions: so that regions become free as wholes.
            size, start, region = min(found, key=lambda each: each[:2])
            region.free.take(size, start, num_bytes)
            return region, start

    def _collect(self) -> None:
        """Takes back what was returned. A finalizer runs wherever the last reference went, also while this thread holds
        the lock, so it only notes what is to be taken back."""
        with contextlib.suppress(IndexError):
            while True:
                region, start, stop = self._returned.popleft()
                region.free.give_back(start, stop)
        spare = [region for region in self._regions if region.free.is_whole]
        for region in spare[1:]:
            self._regions.remove(region)

    def trim(self) -> None:
        """Gives all memory that no tensor refers to back to the system, in whole regions. If another caller is at work,
        or a finalizer calls this while its thread is, nothing is done."""
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
                self._regions = [region for region in self._regions if not region.free.is_whole]
            finally:
                self._lock.release()


_arena = Arena()


def arena() -> Arena:
    """Returns the arena of this process, which all masks share."""
    return _arena


def copied(rows: torch.Tensor) -> torch.Tensor:
    """Returns a copy of rows, shape (num_rows, features): in memory of the arena if they are on the CPU."""
    return arena().rows(rows.shape[0], rows.shape[1], rows.dtype).copy_(rows) if rows.is_cpu else rows.clone()


def packed(effects: torch.Tensor) -> torch.Tensor:
    """Returns effects packed (`wire.ring.widths.pack_effect`), in memory of the arena.

    Args:
        effects: int32, shape (num_rows, features), CPU.
    """
    num_rows, features = effects.shape
    return pack_effect(effects, arena().rows(num_rows, EFFECT_BYTES * features, torch.uint8))


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns a copy of several ranges of rows, one after the other, where `copied` puts them."""
    if not parts[0].is_cpu:
        return torch.cat(tuple(parts))
    made = arena().rows(sum(part.shape[0] for part in parts), parts[0].shape[1], parts[0].dtype)
    return torch.cat(tuple(parts), out=made)


def _after_fork_in_child() -> None:
    global _arena
    _arena = Arena()  # Another thread may have held the old one's lock.


os.register_at_fork(after_in_child=_after_fork_in_child)
