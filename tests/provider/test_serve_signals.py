"""Tests what a signal does to `provider serve` while it shuts down."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from provider.serve import NODE_LOST_EXIT, _stop

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = [signal.getsignal(one) for one in STOPPING]
    yield
    for one, handler in zip(STOPPING, before, strict=True):
        signal.signal(one, handler)


@pytest.mark.parametrize("second", STOPPING)
@pytest.mark.parametrize(("first", "status"), [(signal.SIGTERM, 0), (signal.SIGUSR1, NODE_LOST_EXIT)])
def test_a_second_signal_neither_interrupts_the_shutdown_nor_changes_its_status(
    first: signal.Signals, status: int, second: signal.Signals
) -> None:
    for one in STOPPING:
        signal.signal(one, _stop)
    with pytest.raises(SystemExit) as caught:
        signal.raise_signal(first)
    assert caught.value.code == status
    signal.raise_signal(second)
