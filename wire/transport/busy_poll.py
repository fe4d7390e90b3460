"""Looking for the next message for a moment before going to sleep: who sleeps must be woken.

On a virtual machine a core with nothing to do goes back to the host, and being woken takes 50 to 300 µs, twice a layer
of a decode step. Looking costs processor time instead, so it is done only where it is likely to be short, in the
manner of KVM's halt polling (Documentation/virt/kvm/halt-polling.rst in Linux) with one step from nothing to all.

Guarantees: who waited long goes to sleep at once the next time; one thread of a process looks at a time; other threads
of this core go first. It never decides whether a message has come: who stops looking sleeps as before.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

MOST_S = 0.002
"""A layer of a decode step is there in 0.3 to 1.5 ms, and large products take longer."""
SMALL_BYTES = 1 << 16
"""After a larger message nobody decodes."""
_one_at_a_time = threading.Lock()
_let_others_go_first: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


def is_worthwhile() -> bool:
    """Whether this process has a second core, for what it waits for."""
    return (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1) > 1


class BusyPoll:
    """One connection's; for who receives."""

    def __init__(self, most_s: float = MOST_S, may_look: Callable[[], bool] = lambda: True) -> None:
        """Args.

        most_s: to look for; 0 never does.
        may_look: whether the core is not wanted for something else; asked all the time.
        """
        self._most_s = most_s if is_worthwhile() else 0.0
        self._may_look = may_look
        self._was_short = False
        self._began_s = 0.0

    def look(self, has_come: Callable[[], object], last_bytes: int) -> None:
        """Before sleep: returns as soon as something has come, or when it is time to sleep.

        Args:
            has_come: must not wait.
            last_bytes: size of the last message.
        """
        self._began_s = time.perf_counter()
        if not self._was_short or last_bytes > SMALL_BYTES or not _one_at_a_time.acquire(blocking=False):
            return
        try:
            give_up_at = self._began_s + self._most_s
            while time.perf_counter() < give_up_at and self._may_look() and not has_come():
                _let_others_go_first()
        finally:
            _one_at_a_time.release()

    def woke(self) -> None:
        """After it: something has come."""
        self._was_short = time.perf_counter() - self._began_s < self._most_s
