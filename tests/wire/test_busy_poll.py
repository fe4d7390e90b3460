"""Tests which threads poll for a message before they sleep, when, and for how long."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.support.threads import in_child
from tests.support.waiting import WAIT_S
from wire.errors import ConfigurationError
from wire.transport import busy_poll
from wire.transport.busy_poll import LONGEST_S, MOST_S, VARIABLE, BusyPoll, is_worthwhile, tenants_most_s

STEP_S = 0.0001


class Clock:
    """Implements a clock that advances a little at each reading."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        self.now_s += STEP_S
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(busy_poll, "perf_counter", made)
    monkeypatch.setattr(busy_poll, "is_worthwhile", lambda: True)
    return made


class Looks:
    """Implements an event that comes after a given number of polls."""

    def __init__(self, until: int) -> None:
        self.until, self.number = until, 0

    def __call__(self) -> bool:
        self.number += 1
        return self.number >= self.until


def after_a_short_wait(most_s: float = MOST_S) -> BusyPoll:
    poll = BusyPoll(most_s)
    poll.look(lambda: True, True)
    poll.woke()
    return poll


def looks_of(poll: BusyPoll, until: int = 5, is_likely: bool = True) -> int:
    looks = Looks(until)
    poll.look(looks, is_likely)
    return looks.number


def test_the_first_wait_is_sleep() -> None:
    assert looks_of(BusyPoll()) == 0


def test_after_a_short_wait_it_looks_until_something_comes() -> None:
    assert looks_of(after_a_short_wait()) == 5


def test_after_a_long_wait_it_sleeps_at_once_until_one_is_short_again(clock: Clock) -> None:
    poll = after_a_short_wait()
    poll.look(lambda: True, True)
    clock.now_s += 2 * MOST_S
    poll.woke()
    assert looks_of(poll) == 0
    poll.woke()
    assert looks_of(poll) == 5


def test_it_stops_when_the_time_is_over(clock: Clock) -> None:
    poll = after_a_short_wait()
    began_s = clock.now_s
    assert 1 < looks_of(poll, until=10_000) < MOST_S / STEP_S
    assert MOST_S <= clock.now_s - began_s < MOST_S + 5 * STEP_S


def test_what_is_unlikely_is_not_waited_for() -> None:
    poll = after_a_short_wait()
    assert looks_of(poll, is_likely=False) == 0
    poll.woke()
    assert looks_of(poll) == 5


def test_zero_never_looks() -> None:
    assert looks_of(after_a_short_wait(most_s=0.0)) == 0


def test_a_core_that_is_wanted_is_left() -> None:
    answers = iter([True, True, True, False])
    poll = BusyPoll(MOST_S, lambda: next(answers))
    assert looks_of(poll, until=1) == 0
    poll.woke()
    assert looks_of(poll, until=1000) == 3


def test_one_thread_of_a_process_looks() -> None:
    is_looking, go_on = threading.Event(), threading.Event()

    def has_come() -> bool:
        is_looking.set()
        return go_on.wait(WAIT_S)

    first, second = after_a_short_wait(), after_a_short_wait()
    thread = threading.Thread(target=first.look, args=(has_come, True))
    thread.start()
    assert is_looking.wait(WAIT_S)
    assert looks_of(second) == 0
    go_on.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    second.woke()
    assert looks_of(second) == 5


def test_a_look_that_fails_lets_the_next_one_look() -> None:
    def broken() -> bool:
        raise OSError

    with pytest.raises(OSError):
        after_a_short_wait().look(broken, True)
    assert looks_of(after_a_short_wait()) == 5


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_look_that_was_never_ended_is_over_in_time(clock: Clock) -> None:
    """A child that is forked during a poll inherits a poll that nobody ends. After `MOST_S` seconds it no longer
    counts, and the child can poll."""
    answers: list[str] = []

    def child() -> str:
        poll = after_a_short_wait()
        at_once = looks_of(poll)
        clock.now_s += MOST_S
        poll.woke()
        return f"{at_once} looks, then {looks_of(after_a_short_wait())}"

    after_a_short_wait().look(lambda: answers.append(in_child(child)) or True, True)
    assert answers == ["0 looks, then 5"]


@pytest.mark.parametrize(
    ("cores", "cpu_max", "expected"),
    [
        ({0}, None, False),
        ({0, 1}, None, True),
        ({0, 1}, "max 100000\n", True),
        ({0, 1}, "200000 100000\n", True),
        ({0, 1}, "199999 100000\n", False),
        ({0}, "max 100000\n", False),
        ({0, 1}, "rubbish", True),
    ],
)
def test_less_than_two_cores_are_not_enough(
    cores: set[int], cpu_max: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cpu.max"
    if cpu_max is not None:
        path.write_text(cpu_max)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    monkeypatch.setattr(busy_poll, "_CPU_MAX", path)
    assert is_worthwhile() == expected
    monkeypatch.setattr(busy_poll, "is_worthwhile", is_worthwhile)
    assert looks_of(after_a_short_wait()) == (5 if expected else 0)


@pytest.mark.parametrize(("text", "expected"), [("", MOST_S), ("0", 0.0), (" 1.5 ", 0.0015), ("10", LONGEST_S)])
def test_a_tenant_chooses(text: str, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    assert tenants_most_s() == expected


@pytest.mark.parametrize("text", ["soon", "-1", "10.1", "nan", "inf"])
def test_what_is_no_such_time_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigurationError, match=VARIABLE):
        tenants_most_s()
