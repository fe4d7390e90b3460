"""This module polls for the next message for a short time before a waiting thread goes to sleep, since waking a
sleeping thread takes time.

On a virtual machine an idle core goes back to the host, and waking a thread takes 50 to 300 µs, twice for each layer of
a decode step. Polling costs processor time instead, so a thread polls only if the wait is likely to be short. The
method is that of KVM's halt polling (Documentation/virt/kvm/halt-polling.rst in Linux), except that the polling time
goes from zero to its full length in one step.

Guarantees: a thread whose last wait was long goes to sleep at once the next time. One thread of a process polls at a
time, except for a moment in which two may begin together. Other threads that can use this core run first. Polling never
decides whether a message has come: a thread that stops polling sleeps as it would have without polling. There is no
lock that an interrupt or a fork could leave locked.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, sleep
from typing import TypeVar

from wire.errors import ConfigurationError

MOST_S = 0.002
"""The default length of a poll, 2 ms. The reply for a layer of a decode step comes within 0.3 to 1.5 ms; large products
take longer."""
LONGEST_S = 0.01
"""The longest poll that a user may ask for, 10 ms. A reply that takes longer than this is not followed soon by another
reply."""
SMALL_BYTES = 1 << 16
"""The largest frame, 64 KiB, after which a thread polls: a peer that sends larger frames is not decoding."""
VARIABLE = "VEILBASE_BUSY_POLL_MS"
"""The environment variable that sets the length of a tenant's polls in milliseconds. A provider has a setting
instead."""
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
"""The file in which a container finds its own processor quota: microseconds of processor time, or `max`, and the period
that they are for."""
_let_others_go_first: Callable[[], None] = getattr(os, "sched_yield", lambda: sleep(0))
_Found = TypeVar("_Found")
_looks_until_s = 0.0
"""The time, on `perf_counter`'s clock, at which the running poll of this process ends; a past time if no thread
polls."""


def is_worthwhile() -> bool:
    """Tells whether this process has a second core, which can do the awaited work while a thread polls."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CPU_MAX.read_text().split()
        return cores > 1 and (quota == "max" or int(quota) >= 2 * int(period))
    except (OSError, ValueError):  # The system is not Linux, or has another version of control groups.
        return cores > 1


def tenants_most_s() -> float:
    """Returns for how many seconds a tenant polls: the time in the environment variable `VARIABLE`, or `MOST_S` if it
    is not set.

    Raises:
        ConfigurationError: the variable's value is not a number of milliseconds from 0 to 10.
    """
    text = os.environ.get(VARIABLE, "").strip()
    try:
        most_s = float(text) / 1000 if text else MOST_S
    except ValueError:
        most_s = -1.0
    if not 0 <= most_s <= LONGEST_S:
        raise ConfigurationError(
            f"the environment variable {VARIABLE} must be a number of milliseconds from 0 to {1000 * LONGEST_S:.0f}, "
            f"got {ascii(text)[:40]}"
        )
    return most_s


class BusyPoll:
    """Polls for the next message of one connection. Only the thread that receives may use it."""

    def __init__(self, most_s: float = MOST_S, may_look: Callable[[], bool] = lambda: True) -> None:
        """Sets up the polls of one connection. The first wait always sleeps, since no earlier wait was short.

        Args:
            most_s: for how many seconds to poll; 0 never polls.
            may_look: tells whether the core is free for polling; it is called in every round of a poll.
        """
        self._most_s = most_s if is_worthwhile() else 0.0
        self._may_look = may_look
        self._was_short = False
        self._began_s = 0.0

    def look(self, has_come: Callable[[], _Found], is_likely: bool) -> _Found | None:
        """Polls until a message has come or the thread should sleep. Callers must call this before every sleep.

        Args:
            has_come: returns what has come, without waiting for it; anything false says that nothing has.
            is_likely: whether the next message is probably a small one from a peer that decodes.

        Returns:
            What `has_come` returned, or None if the thread should sleep.
        """
        global _looks_until_s
        now = self._began_s = perf_counter()
        if not is_likely or not self._was_short or now < _looks_until_s:
            return None
        give_up_at = _looks_until_s = now + self._most_s
        try:
            while perf_counter() < give_up_at and self._may_look():
                found = has_come()
                if found:
                    return found
                _let_others_go_first()
        finally:
            _looks_until_s = 0.0
        return None

    def woke(self) -> None:
        """Records whether the wait that began with the last call of `look` was short. Callers must call this when that
        wait has ended, whether the thread slept or only polled."""
        self._was_short = perf_counter() - self._began_s < self._most_s
