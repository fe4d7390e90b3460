"""Polls for the next message for a moment before the waiting thread goes to sleep, because a sleeping thread must be
woken.

On a virtual machine a core with nothing to do goes back to the host, and being woken takes 50 to 300 µs, twice a layer
of a decode step. Polling costs processor time instead, so it is done only where it is likely to be short, in the manner
of KVM's halt polling (Documentation/virt/kvm/halt-polling.rst in Linux), except that the polling time goes from nothing
to its full length in one step.

Guarantees: a thread that waited long goes to sleep at once the next time; one thread of a process polls at a time,
except for the moment in which two begin; other threads of this core go first. Polling never decides whether a message
has come: a thread that stops polling sleeps as it would have done without. There is no lock, which an interrupt or a
fork could leave locked.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, sleep

from wire.errors import ConfigurationError

MOST_S = 0.002
"""Default length of a poll, 2 ms: the reply for a layer of a decode step is there in 0.3 to 1.5 ms, and large products
take longer."""
LONGEST_S = 0.01
"""Longest poll that may be asked for, 10 ms: a reply that takes longer is not followed soon by another."""
SMALL_BYTES = 1 << 16
"""Largest frame in bytes after which a thread polls, 64 KiB: a peer that sends more is not decoding."""
VARIABLE = "VEILBASE_BUSY_POLL_MS"
"""Environment variable that sets the length of a tenant's polls; a provider has a setting for it."""
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
"""The container's processor quota as it sees it itself: microseconds of processor time, or `max`, and the period they
are for."""
_let_others_go_first: Callable[[], None] = getattr(os, "sched_yield", lambda: sleep(0))
_looks_until_s = 0.0
"""When the poll that runs in this process ends, on `perf_counter`'s clock; in the past where no thread polls."""


def is_worthwhile() -> bool:
    """Tells whether this process has a second core for the work that it waits for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CPU_MAX.read_text().split()
        return cores > 1 and (quota == "max" or int(quota) >= 2 * int(period))
    except (OSError, ValueError):  # This is another system, or has another version of control groups.
        return cores > 1


def tenants_most_s() -> float:
    """Returns how many seconds a tenant polls: what `VARIABLE` says, or `MOST_S`.

    Raises:
        ConfigurationError: the variable does not hold such a time.
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
    """Polls for one connection. It belongs to the thread that receives."""

    def __init__(self, most_s: float = MOST_S, may_look: Callable[[], bool] = lambda: True) -> None:
        """Prepares; nothing has been received yet, so the first wait sleeps at once.

        Args:
            most_s: how many seconds to poll; 0 never polls.
            may_look: tells whether the core is not wanted for something else; it is asked all the time.
        """
        self._most_s = most_s if is_worthwhile() else 0.0
        self._may_look = may_look
        self._was_short = False
        self._began_s = 0.0

    def look(self, has_come: Callable[[], object], is_likely: bool) -> None:
        """Polls before every sleep; returns as soon as a message has come, or when it is time to sleep.

        Args:
            has_come: tells whether a message has come, and must not wait for one.
            is_likely: whether the next message is, for all that is known, the next small one of a peer that decodes.
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
        """Notes, after every sleep, that a message has come, and whether the wait was short."""
        self._was_short = perf_counter() - self._began_s < self._most_s
