"""Waits for events in tests. If an event does not come within a time limit, the test fails with a message that names
it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

WAIT_S = 60.0
"""The most seconds that a test waits. It is half of a test's time limit, so that the test's own message appears first.
It is no measure of how fast a machine must be."""
SLOW_TIMEOUT_S = 600.0
"""The time limit of a test of `make test-slow`, in seconds. It is no measure of how fast a machine must be."""


def until(condition: Callable[[], object], what: str) -> None:
    """Polls until a condition holds, and fails the test after WAIT_S seconds. It is for conditions without an event."""
    give_up_at = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up_at, f"waited {WAIT_S:.0f} s in vain for {what}"
        threading.Event().wait(0.002)


def comes(event: threading.Event, what: str) -> None:
    """Waits until an event is set, and fails the test after WAIT_S seconds."""
    assert event.wait(WAIT_S), f"waited {WAIT_S:.0f} s in vain for {what}"


def end(threads: Iterable[threading.Thread] | threading.Thread) -> None:
    """Waits until threads have ended, and fails the test if one takes more than WAIT_S seconds."""
    for thread in [threads] if isinstance(threads, threading.Thread) else threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), f"the thread {thread.name} has not ended within {WAIT_S:.0f} s"
