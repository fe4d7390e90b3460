"""Bounds each caller's number of open calls (streams and downloads), since each call occupies a thread.

Guarantees: no caller has more than `MAX_CALLS_PER_TENANT` calls open. The bound is lower once half of all threads are
taken, so that a few dozen callers cannot use up all threads. A refused call is not counted.

Threads: any thread may call this. `_lock` guards the counts.
"""

from __future__ import annotations

import threading
from collections import Counter

MAX_CALLS_PER_TENANT = 8
"""The most streams and downloads that one tenant may have open."""
_CALLS_OF_EACH = 2
"""The most streams and downloads that one tenant may have open while all tenants together occupy half of the threads or
more."""


class Calls:
    """Counts each caller's open calls (streams and downloads), and refuses further calls beyond a bound."""

    def __init__(self, most_threads: int) -> None:
        """Sets all counts to zero. `most_threads` is the number of threads for all callers together; once half as many
        calls are open, the lower bound holds."""
        self._most_threads = most_threads
        self._lock = threading.Lock()
        self._open: Counter[str] = Counter()

    def take_place(self, caller: str) -> bool:
        """Counts one more open call of a caller and returns True; returns False and counts nothing if the caller has
        too many open calls. After True, callers must call `leave` when the call ends."""
        with self._lock:
            is_crowded = 2 * self._open.total() >= self._most_threads
            if self._open[caller] >= (_CALLS_OF_EACH if is_crowded else MAX_CALLS_PER_TENANT):
                return False
            self._open[caller] += 1
            return True

    def leave(self, caller: str) -> None:
        """Subtracts one ended call from a caller's count."""
        with self._lock:
            self._open[caller] -= 1
            if self._open[caller] <= 0:
                del self._open[caller]

    def counts(self) -> dict[str, int]:
        """Returns the number of open calls by caller's name, for callers with at least one open call."""
        with self._lock:
            return dict(self._open)
