"""Looking for the next message for a moment before going to sleep: who sleeps must be woken.

On a virtual machine a core with nothing to do goes back to the host, and being woken takes 50 to 300 µs, twice a layer
of a decode step. Looking costs processor time instead, so it is done only where it is likely to be short, in the
manner of KVM's halt polling (Documentation/virt/kvm/halt-polling.rst in Linux) with one step from nothing to all.

Guarantees: who waited long goes to sleep at once the next time; one thread of a process looks at a time, but for the
moment in which two begin; other threads of this core go first. It never decides whether a message has come: who stops
looking sleeps as before. No lock, which an interrupt or a fork could leave locked.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, sleep

from wire.errors import ConfigurationError

MOST_S = 0.002
"""A layer of a decode step is there in 0.3 to 1.5 ms, and large products take longer."""
LONGEST_S = 0.01
"""That may be asked for: nothing that takes longer comes again soon."""
SMALL_BYTES = 1 << 16
"""After a larger frame nobody decodes."""
VARIABLE = "VEILBASE_BUSY_POLL_MS"
"""Of a tenant; a provider has a setting."""
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
"""Of the container, as it sees itself: microseconds of processor time, or max, in so many of time."""
_let_others_go_first: Callable[[], None] = getattr(os, "sched_yield", lambda: sleep(0))
_looks_until_s = 0.0
"""When the look of whoever looks in this process is over; in the past where nobody does."""


def is_worthwhile() -> bool:
    """Whether this process has a second core, for what it waits for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CPU_MAX.read_text().split()
        return cores > 1 and (quota == "max" or int(quota) >= 2 * int(period))
    except (OSError, ValueError):  # another system, or another version of control groups
        return cores > 1


def tenants_most_s() -> float:
    """How long a tenant looks: what `VARIABLE` says, or `MOST_S`.

    Raises:
        ConfigurationError: it is no such time.
    """
    text = os.environ.get(VARIABLE, "").strip()
    try:
        most_s = float(text) / 1000 if text else MOST_S
    except ValueError:
        most_s = -1.0
    if not 0 <= most_s <= LONGEST_S:
        raise ConfigurationError(f"{VARIABLE} must be a number of milliseconds from 0 to {1000 * LONGEST_S:.0f}")
    return most_s


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

    def look(self, has_come: Callable[[], object], is_likely: bool) -> None:
        """Before every sleep: returns as soon as something has come, or when it is time to sleep.

        Args:
            has_come: must not wait.
            is_likely: whether what comes next is the next small message of who decodes, for all that is known.
        """
        global _looks_until_s
        now = self._began_s = perf_counter()
        if not is_likely or not self._was_short or now < _looks_until_s:
            return
        give_up_at = _looks_until_s = now + self._most_s
        try:
            while perf_counter() < give_up_at and self._may_look() and not has_come():
                _let_others_go_first()
        finally:
            _looks_until_s = 0.0

    def woke(self) -> None:
        """After it: something has come."""
        self._was_short = perf_counter() - self._began_s < self._most_s
