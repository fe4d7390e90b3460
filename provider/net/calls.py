"""How many calls each caller has open, and whether it may have one more: every call holds a thread, and all callers
share the threads.

Guarantees: no caller has more than `MAX_CALLS_PER_TENANT`, and fewer once half of all threads are taken, so that a few
dozen callers cannot shut the next one out; a call that is refused takes nothing.

Threads: any. `_lock` guards the counts.
"""

from __future__ import annotations

import threading
from collections import Counter

MAX_CALLS_PER_TENANT = 8
"""Most streams and downloads of one tenant at a time."""
_CALLS_OF_EACH = 2
"""The same limit while half of all threads or more are taken."""


class Calls:
    """The calls that are open."""

    def __init__(self, most_threads: int) -> None:
        """Args: most_threads: how many threads all callers share."""
        self._most_threads = most_threads
        self._lock = threading.Lock()
        self._open: Counter[str] = Counter()

    def take_place(self, caller: str) -> bool:
        """Counts one more call of this caller until `leave`; returns False, and counts nothing, where it has enough."""
        with self._lock:
            is_crowded = 2 * self._open.total() >= self._most_threads
            if self._open[caller] >= (_CALLS_OF_EACH if is_crowded else MAX_CALLS_PER_TENANT):
                return False
            self._open[caller] += 1
            return True

    def leave(self, caller: str) -> None:
        """Notes that one of this caller's calls has ended."""
        with self._lock:
            self._open[caller] -= 1
            if self._open[caller] <= 0:
                del self._open[caller]

    def counts(self) -> dict[str, int]:
        """Returns how many calls each caller has open, without callers that have none."""
        with self._lock:
            return dict(self._open)
