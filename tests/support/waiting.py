"""Waiting in tests: for events, with a bound that only a test which fails anyhow reaches, and a sentence then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

WAIT_S = 60.0
"""No word on how fast the machine has to be: half of what a test may take, so that its own sentence comes first."""
SLOW_TIMEOUT_S = 600.0
"""When a test of `make test-slow` hangs; no word on how fast the machine has to be."""


def until(condition: Callable[[], object], what: str) -> None:
    """Waits for what nothing announces."""
    give_up_at = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up_at, f"waited {WAIT_S:.0f} s in vain for {what}"
        threading.Event().wait(0.002)


def comes(event: threading.Event, what: str) -> None:
    """Waits for an event."""
    assert event.wait(WAIT_S), f"waited {WAIT_S:.0f} s in vain for {what}"


def end(threads: Iterable[threading.Thread] | threading.Thread) -> None:
    """Waits for threads to end."""
    for thread in [threads] if isinstance(threads, threading.Thread) else threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), f"the thread {thread.name} has not ended within {WAIT_S:.0f} s"
