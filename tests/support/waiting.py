"""Waits for events in tests. If an event does not come within a time limit, the test fails with a message that names
it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

WAIT_S = 60.0
"""The most seconds that a test waits, unless it is slow. It is half of a test's time limit, so that the test's own
message appears first. It is no measure of how fast a machine must be."""
SLOW_TIMEOUT_S = 600.0
"""The time limit of a test of `make test-slow`, in seconds. It is no measure of how fast a machine must be."""
limit_s = WAIT_S
"""The most seconds that the running test waits: half of its time limit. tests/conftest.py sets it for each test."""


def until(condition: Callable[[], object], what: str) -> None:
    """Polls until a condition that has no event holds, and fails the test after `limit_s` seconds."""
    give_up_at = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up_at, f"waited {limit_s:.0f} s in vain for {what}"
        threading.Event().wait(0.002)


def comes(event: threading.Event, what: str) -> None:
    """Waits until an event is set, and fails the test after `limit_s` seconds."""
    assert event.wait(limit_s), f"waited {limit_s:.0f} s in vain for {what}"


def end(threads: Iterable[threading.Thread] | threading.Thread) -> None:
    """Waits until threads have ended, and fails the test if one takes more than `limit_s` seconds."""
    for thread in [threads] if isinstance(threads, threading.Thread) else threads:
        thread.join(limit_s)
        assert not thread.is_alive(), f"the thread {thread.name} has not ended within {limit_s:.0f} s"
