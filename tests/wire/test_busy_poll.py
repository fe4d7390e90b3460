"""Who looks for a message before sleep: when, for how long, and who does not."""

from __future__ import annotations

import threading
import time

import pytest

from wire.transport import busy_poll
from wire.transport.busy_poll import SMALL_BYTES, BusyPoll

TIMEOUT_S = 20.0


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_poll, "is_worthwhile", lambda: True)


class Looks:
    """Something that comes after so many looks."""

    def __init__(self, until: int) -> None:
        self.until, self.number = until, 0

    def __call__(self) -> bool:
        self.number += 1
        return self.number >= self.until


def after_a_short_wait(most_s: float = 60.0) -> BusyPoll:
    poll = BusyPoll(most_s)
    poll.look(lambda: True, 0)
    poll.woke()
    return poll


def looks_of(poll: BusyPoll, until: int = 5, last_bytes: int = 100) -> int:
    looks = Looks(until)
    poll.look(looks, last_bytes)
    return looks.number


def test_the_first_wait_is_sleep() -> None:
    assert looks_of(BusyPoll(60.0)) == 0


def test_after_a_short_wait_it_looks_until_something_comes() -> None:
    assert looks_of(after_a_short_wait()) == 5


def test_after_a_long_wait_it_sleeps_at_once_until_one_is_short_again() -> None:
    poll = after_a_short_wait(most_s=0.05)
    poll.look(lambda: True, 0)
    time.sleep(0.1)
    poll.woke()
    assert looks_of(poll) == 0
    poll.woke()
    assert looks_of(poll) > 0


def test_it_stops_when_the_time_is_over() -> None:
    poll = after_a_short_wait(most_s=0.05)
    began = time.monotonic()
    poll.look(lambda: False, 0)
    assert time.monotonic() - began >= 0.05


def test_after_a_large_message_it_sleeps() -> None:
    assert looks_of(after_a_short_wait(), last_bytes=SMALL_BYTES + 1) == 0
    assert looks_of(after_a_short_wait(), last_bytes=SMALL_BYTES) == 5


def test_zero_never_looks() -> None:
    assert looks_of(after_a_short_wait(most_s=0.0)) == 0


def test_a_core_that_is_wanted_is_left() -> None:
    answers = iter([True, True, False])
    poll = BusyPoll(60.0, lambda: next(answers))
    poll.woke()
    poll._was_short = True
    assert looks_of(poll, until=1000) == 2


def test_one_thread_of_a_process_looks() -> None:
    is_looking, go_on = threading.Event(), threading.Event()

    def has_come() -> bool:
        is_looking.set()
        return go_on.is_set()

    first, second = after_a_short_wait(), after_a_short_wait()
    thread = threading.Thread(target=first.look, args=(has_come, 0))
    thread.start()
    assert is_looking.wait(TIMEOUT_S)
    assert looks_of(second) == 0
    go_on.set()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert looks_of(second) == 5


def test_a_look_that_fails_lets_the_next_one_look() -> None:
    def broken() -> bool:
        raise OSError

    with pytest.raises(OSError):
        after_a_short_wait().look(broken, 0)
    assert looks_of(after_a_short_wait()) == 5


def test_one_core_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(busy_poll.os, "sched_getaffinity", lambda pid: {0})
    assert looks_of(after_a_short_wait()) == 0
    monkeypatch.setattr(busy_poll.os, "sched_getaffinity", lambda pid: {0, 1})
    assert looks_of(after_a_short_wait()) == 5
