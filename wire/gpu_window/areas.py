"""This module shares out a window's bytes among the requests of one stream.

Guarantees: no two requests have an area in common until the first one's is given back. All threads may call this.
"""

from __future__ import annotations

import bisect
import struct
import threading
from dataclasses import dataclass

from wire.errors import MalformedFrame

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
