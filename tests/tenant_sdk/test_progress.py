"""Tests what is shown on stderr while a run or a preparation goes on, in a terminal and without one."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tenant_sdk import progress
from tenant_sdk.progress import Bars, Lines, Pace, ProgressBar, counting, stages
from tests.support.waiting import comes


class Clock:
    """Stands for a clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def plain() -> Console:
    """Returns a console that is no terminal."""
    return Console(file=io.StringIO(), force_terminal=False)


def terminal() -> tuple[Console, io.StringIO]:
    """Returns a console that is a terminal, and what it shows."""
    screen = io.StringIO()
    return Console(file=screen, force_terminal=True, force_interactive=True, width=100), screen


@pytest.mark.parametrize("step_s", [0.5, 29.0, 31.0, 4000.0])
def test_the_remaining_time_is_known_however_long_a_step_takes(step_s: float) -> None:
    clock = Clock()
    pace = Pace(clock)
    assert pace.remaining_s(4) is None
    for done in (1, 2, 3):
        clock.now_s += step_s
        pace.reach(done)
        assert pace.remaining_s(4) == pytest.approx((4 - done) * step_s)


def test_both_times_are_together_the_whole() -> None:
    clock = Clock()
    pace = Pace(clock)
    clock.now_s += 40
    pace.reach(1)
    for _ in range(4):
        clock.now_s += 9.7
        remaining_s = pace.remaining_s(3)
        assert remaining_s is not None
        assert pace.elapsed_s + remaining_s == pytest.approx(120)
    clock.now_s += 100  # the second step is late, and the third one is still to come
    assert pace.remaining_s(3) == pytest.approx(40)
    pace.reach(3)
    assert pace.shown(3) == ("0:02:58", "0:00:00")


def test_what_comes_before_the_steps_counts_for_none() -> None:
    clock = Clock()
    pace = Pace(clock)
    clock.now_s += 30  # the checkpoint is loaded
    pace.reach(0)
    clock.now_s += 2
    pace.reach(1)
    assert (pace.elapsed_s, pace.remaining_s(11)) == (32, pytest.approx(20))


def test_a_resumed_run_counts_its_own_steps_only() -> None:
    clock = Clock()
    pace = Pace(clock)
    pace.begin(90)
    clock.now_s += 60
    pace.reach(91)
    assert pace.remaining_s(100) == pytest.approx(540)


def train(bar: ProgressBar, clock: Clock, num_steps: int, step_s: float) -> None:
    state: Any = SimpleNamespace(global_step=0, max_steps=num_steps)
    bar.on_train_begin(None, state, None)
    for step in range(1, num_steps + 1):
        clock.now_s += step_s
        state.global_step = step
        bar.on_log(None, state, None, {"loss": 1 / step})
    bar.on_log(None, state, None, {"eval_loss": 2.0})
    bar.on_train_end(None, state, None)


def test_without_a_terminal_each_step_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    bar = ProgressBar(plain(), clock)
    train(bar, clock, 3, 45.0)
    bar.stop()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "fine-tuning 0/3 ...",
        "fine-tuning 1/3  loss 1.0000  0:00:45 elapsed, 0:01:30 left",
        "fine-tuning 2/3  loss 0.5000  0:01:30 elapsed, 0:00:45 left",
        "fine-tuning 3/3  loss 0.3333  0:02:15 elapsed, 0:00:00 left",
    ]


def test_a_long_step_has_lines_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    bar = ProgressBar(plain(), clock)
    state: Any = SimpleNamespace(global_step=0, max_steps=2)
    bar.on_train_begin(None, state, None)
    for step in (1, 2):
        for _ in range(39):
            clock.now_s += 1
            bar.look()
        state.global_step = step
        bar.on_log(None, state, None, {"loss": 2.0})
    bar.on_train_end(None, state, None)
    assert capsys.readouterr().err.splitlines() == [
        "fine-tuning 0/2 ...",
        "fine-tuning 0/2  0:00:15 elapsed, -:--:-- left",
        "fine-tuning 0/2  0:00:30 elapsed, -:--:-- left",
        "fine-tuning 1/2  loss 2.0000  0:00:39 elapsed, 0:00:39 left",
        "fine-tuning 1/2  0:00:54 elapsed, 0:00:24 left",
        "fine-tuning 1/2  0:01:09 elapsed, 0:00:09 left",
        "fine-tuning 2/2  loss 2.0000  0:01:18 elapsed, 0:00:00 left",
    ]


def test_a_line_is_there_before_the_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    with counting("checking", console=plain()) as report:
        assert capsys.readouterr().err == "checking ...\n"
        for done in range(241):
            report(done, 240)
    assert capsys.readouterr().err == "", "nothing to say about what takes no time"
    with counting("checking", False, console=plain()) as report:
        report(1, 1)
    with stages(console=plain()):
        pass
    assert capsys.readouterr().err == ""


def test_without_a_terminal_a_line_comes_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    lines = Lines(clock, is_long=True)
    lines("reading", 0, 100, "MB")
    for second in range(1, 18):
        clock.now_s += 1
        if second == 12:
            lines("reading", 40, 100, "MB")
        lines.look()
    assert capsys.readouterr().err.splitlines() == [
        "reading ...",
        "reading 0/100 MB  0:00:05 elapsed, -:--:-- left",
        "reading 0/100 MB  0:00:10 elapsed, -:--:-- left",
        "reading 40/100 MB  0:00:15 elapsed, 0:00:18 left",
    ]
    clock.now_s += 1
    lines("reading", 100, 100, "MB")
    for _ in range(20):
        clock.now_s += 1
        lines.look()
    told = capsys.readouterr().err
    assert told == "reading 100/100 MB  0:00:18 elapsed, 0:00:00 left\n", "nothing comes after the end"


def test_the_longer_a_stage_takes_the_fewer_lines_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    lines = Lines(clock, is_long=True)
    lines("waiting")
    for _ in range(3600):
        clock.now_s += 1
        lines.look()
    told = capsys.readouterr().err.splitlines()
    assert told[:3] == ["waiting ...", "waiting ...  0:00:05 elapsed", "waiting ...  0:00:10 elapsed"]
    assert 80 < len(told) < 120


def test_short_stages_have_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    lines = Lines(clock)
    for stage in ("short", "as short", "long"):
        lines(stage, 0, 3, "parts")
        clock.now_s += 0.9
        lines(stage, 1, 3, "parts")
    clock.now_s += 0.2
    lines.look()
    assert capsys.readouterr().err.splitlines() == ["long 1/3 parts  0:00:01 elapsed, 0:00:02 left"]
    with stages() as report:
        report("short")
    assert capsys.readouterr().err == ""


def test_lines_come_by_themselves_while_a_stage_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = threading.Event()
    monkeypatch.setattr(progress, "LOOK_S", 0.0)
    for kind, console in ((Lines, plain()), (Bars, terminal()[0])):
        looked.clear()
        monkeypatch.setattr(kind, "look", lambda shown: looked.set())
        with stages(console=console) as report:
            report("loading")
            comes(looked, "the look")


def test_in_a_terminal_stages_have_bars_and_short_ones_none() -> None:
    clock, (console, screen) = Clock(), terminal()
    bars = Bars(console, clock)
    for stage, took_s in (("as short", 0.5), ("long", 2.0), ("short", 0.5)):
        bars(stage, 0, 7, "MB")
        clock.now_s += took_s
        bars.look()
        assert (screen.getvalue() == "") == (stage == "as short")
        bars(stage, 7, 7, "MB")
    bars.end()
    end = screen.getvalue().rpartition("long")[2]
    assert "7/7 MB" in end
    assert "0:00:02" in end, "the clock of a stage stops at its end"
    assert "short" not in end


def test_in_a_terminal_a_bar_shows_both_times(capsys: pytest.CaptureFixture[str]) -> None:
    clock, (console, screen) = Clock(), terminal()
    bar = ProgressBar(console, clock)
    state: Any = SimpleNamespace(global_step=0, max_steps=4)
    bar.on_train_begin(None, state, None)
    clock.now_s, state.global_step = clock.now_s + 50, 1
    bar.on_log(None, state, None, {"loss": 2.5})
    bar.stop()
    for part in ("1/4", "loss 2.5000", "0:00:50", "0:02:30"):
        assert part in screen.getvalue()
    with counting("checking", console=console, clock=clock) as report:
        clock.now_s += 31
        report(1, 3)
    assert "0:01:02" in screen.getvalue()
    assert capsys.readouterr().err == ""


def test_without_a_terminal_the_end_prints_no_empty_lines(capsys: pytest.CaptureFixture[str]) -> None:
    console = plain()
    bar = ProgressBar(console=console)
    bar.on_train_begin(None, SimpleNamespace(global_step=0, max_steps=1), None)
    bar.on_train_end(None, SimpleNamespace(global_step=1, max_steps=1), None)
    bar.stop()
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
    assert "" not in capsys.readouterr().err.splitlines()
