"""This module shows on stderr how far training (step and loss) and long preparations are.

In a terminal there are bars. Elsewhere, as in a log file or under a supervisor, there are lines: one for each step of
training, with others within steps that take long, and one every few seconds of a preparation, which has stages.

Guarantees: both times that are shown, the elapsed and the remaining one, are of one clock: together they are the time
that the whole is expected to take, which changes only when a step ends. The remaining time is known once one step has
ended, however long a step takes.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text
from transformers import TrainerCallback

from runtime.command_line import to_stderr
from tenant_sdk.report import Report, unseen

_LINE_S = 5.0
"""The least seconds between two lines of a stage where there is no terminal."""
_LONG_STEP_S = 15.0
"""The seconds of a step of training after which a line says that it goes on."""
_TRAINING = "fine-tuning"
_QUICK_S = 1.0
"""The seconds of a stage that is so short that it is not shown beside others."""
LOOK_S = 0.5
"""The seconds between two looks whether a line is due."""


class Pace:
    """Measures the time of a row of steps, and estimates from their mean when the last step ends."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins at step 0. `clock` returns the present time in seconds."""
        self._clock = clock
        self.begin()

    def begin(self, done: int = 0) -> None:
        """Begins to measure, at the step `done`, which an earlier run may have reached."""
        self._began_s = self._stepping_s = self._reached_s = self._clock()
        self._first = self._done = done

    def reach(self, done: int) -> None:
        """Notes that the step `done` has ended. A step that is not further on is ignored, except that the first one
        says, while none has ended, that steps begin only now: what came before counts for no step."""
        if done > self._done:
            self._done, self._reached_s = done, self._clock()
        elif done == self._first == self._done:
            self._stepping_s = self._clock()

    def end(self) -> None:
        """Stops the clock."""
        ended_s = self._clock()
        self._clock = lambda: ended_s

    @property
    def elapsed_s(self) -> float:
        """Returns the seconds since `begin`, until `end`."""
        return self._clock() - self._began_s

    def remaining_s(self, total: int | None) -> float | None:
        """Returns the seconds that are left until the step `total` ends; None if no step has ended yet, or if `total`
        is not known. A step that takes longer than the mean keeps the time of the steps behind it."""
        if total is None or (total > self._done == self._first):
            return None
        if self._done >= total:
            return 0.0
        mean_s = (self._reached_s - self._stepping_s) / (self._done - self._first)
        since_s = self._clock() - self._reached_s
        return mean_s * (total - self._done - 1) + max(0.0, mean_s - since_s)

    def shown(self, total: int | None) -> tuple[str, str]:
        """Returns the elapsed and the remaining time as h:mm:ss."""
        left = self.remaining_s(total)
        # one is rounded down and the other one up, so that their sum does not change with every second
        return _clock_face(math.floor(self.elapsed_s)), "-:--:--" if left is None else _clock_face(math.ceil(left))


def _clock_face(seconds: int) -> str:
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


class _Times(ProgressColumn):
    """Shows both times of a task, whose field `pace` knows them."""

    def render(self, task: Task) -> Text:
        """Returns the elapsed and the remaining time."""
        elapsed, left = task.fields["pace"].shown(None if task.total is None else int(task.total))
        return Text.assemble((elapsed, "progress.elapsed"), " ", (left, "progress.remaining"))


def _has_bar(console: Console) -> bool:
    """Returns whether a console can move a bar; a dumb terminal cannot."""
    return console.is_interactive or console.is_jupyter


def _line(what: str, done: int, total: int, pace: Pace, more: str = "") -> None:
    elapsed, left = pace.shown(total)
    print(f"{what} {done}/{total}{more}  {elapsed} elapsed, {left} left", file=sys.stderr, flush=True)


class ProgressBar(TrainerCallback):  # type: ignore[misc]
    """Shows the step and the loss of a Trainer in a progress bar, or on a line for each step."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Makes a bar that appears when training begins.

        Args:
            console: where the bar appears, by default stderr; lines go to stderr in any case.
            clock: returns the present time in seconds.
        """
        console = console or Console(stderr=True)
        self._pace, self._has_bar = Pace(clock), _has_bar(console)
        self._clock, self._ended = clock, threading.Event()
        self._step = self._num_steps = 0
        self._printed_s = clock()
        self._bar = Progress(
            TextColumn(_TRAINING), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"),
            _Times(), console=console,
        )  # fmt: skip
        self._task: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Starts the bar, at the step from which the run is resumed."""
        self._pace.begin(state.global_step)
        if self._has_bar:
            self._bar.start()
            self._task = self._bar.add_task(
                "", total=state.max_steps, completed=state.global_step, loss="-", pace=self._pace
            )
        else:  # the first step may take minutes
            self._step, self._num_steps, self._printed_s = state.global_step, state.max_steps, self._clock()
            to_stderr(f"{_TRAINING} {state.global_step}/{state.max_steps} ...")
            threading.Thread(target=_look_until, args=(self._ended, self.look), name="progress", daemon=True).start()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Moves the bar to the step that was logged, or prints its line."""
        if not logs or "loss" not in logs:
            return
        self._pace.reach(state.global_step)
        loss = f"{float(logs['loss']):.4f}"
        if self._has_bar:
            self._bar.update(self._task, completed=state.global_step, loss=loss)
        else:
            self._step, self._printed_s = state.global_step, self._clock()
            _line(_TRAINING, state.global_step, state.max_steps, self._pace, f"  loss {loss}")

    def look(self) -> None:
        """Prints a line where there is no terminal, if a step, or the evaluation after it, has taken long since the
        last one. This is called every half second."""
        if self._clock() - self._printed_s >= max(_LONG_STEP_S, self._pace.elapsed_s / 20):
            self._printed_s = self._clock()
            _line(_TRAINING, self._step, self._num_steps, self._pace)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Moves the progress bar to its last step and ends it."""
        self._pace.reach(state.global_step)
        if self._has_bar:
            self._bar.update(self._task, completed=state.global_step)
        self.stop()

    def stop(self) -> None:
        """Ends the bar at its current step, for a run that failed; a second call does nothing."""
        self._ended.set()
        if self._has_bar:  # without a terminal, rich would print an empty line
            self._bar.stop()


def _look_until(ended: threading.Event, look: Callable[[], object]) -> None:
    while not ended.wait(LOOK_S):
        look()


@contextlib.contextmanager
def stages(
    show: bool = True,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
    *,
    is_long: bool = False,
) -> Iterator[Report]:
    """Shows on stderr how far a preparation of several stages is, unless `show` is false: by `Bars` in a terminal, and
    by `Lines` elsewhere. Stages that take less than a second are not shown.

    Args:
        show: whether anything is shown.
        console: where bars appear, by default stderr; lines go to stderr in any case.
        clock: returns the present time in seconds.
        is_long: whether the first stage is shown at once, since it is known to take long.

    Yields:
        A function that is told how far the preparation is.
    """
    if not show:
        yield unseen
        return
    console = console or Console(stderr=True)
    shown = Bars(console, clock, is_long) if _has_bar(console) else Lines(clock, is_long)
    ended = threading.Event()
    threading.Thread(target=_look_until, args=(ended, shown.look), name="progress", daemon=True).start()
    try:
        yield shown
    finally:
        ended.set()
        shown.end()


@contextlib.contextmanager
def counting(
    what: str, show: bool = True, console: Console | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int, int], None]]:
    """Shows on stderr how far a preparation of one stage is, from the start; see `stages`.

    Args:
        what: the stage.
        show, console, clock: as for `stages`.

    Yields:
        A function that takes the number of steps done and the number of all steps.
    """
    with stages(show, console, clock, is_long=True) as report:
        report(what)
        yield lambda done, total: report(what, done, total)


class _Parts(ProgressColumn):
    """Shows how many parts of a task are done; nothing while their number is not known."""

    def render(self, task: Task) -> Text:
        """Returns the numbers and the unit."""
        if task.total is None:
            return Text("")
        return Text(f"{int(task.completed)}/{int(task.total)} {task.fields['unit']}".rstrip(), "progress.download")


class Bars:
    """Shows a bar for each stage of a preparation in a terminal, below those of the stages before it. What is not shown
    by then appears when a stage has taken `_QUICK_S`."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic, is_long: bool = False) -> None:
        """Shows nothing yet; see `stages` for the arguments."""
        self._bars = Progress(TextColumn("{task.description}"), BarColumn(), _Parts(), _Times(), console=console)
        self._clock, self._is_long, self._lock = clock, is_long, threading.Lock()
        self._stage, self._task, self._pace = "", TaskID(0), Pace(clock)

    def __call__(self, stage: str, done: int = 0, total: int | None = None, unit: str = "") -> None:
        """Notes how far a stage is; see `Report`."""
        with self._lock:
            if stage != self._stage:
                self._end_stage()
                self._stage, self._pace = stage, Pace(self._clock)
                self._task = self._bars.add_task(stage, total=None, pace=self._pace, unit=unit)
            self._pace.reach(done)
            self._bars.update(self._task, completed=done, total=total, unit=unit)
            self._appear()

    def look(self) -> None:
        """Makes the bars appear if it is time. This is called every half second."""
        with self._lock:
            self._appear()

    def end(self) -> None:
        """Leaves the bars as they are."""
        with self._lock:
            self._end_stage()
            self._bars.stop()

    def _appear(self) -> None:
        if self._stage and (self._is_long or self._pace.elapsed_s >= _QUICK_S):
            self._bars.start()

    def _end_stage(self) -> None:
        self._pace.end()
        if self._stage and self._pace.elapsed_s < _QUICK_S and not self._is_long:
            self._bars.update(self._task, visible=False)


class Lines:
    """Prints lines on stderr about the stages of a preparation, where there is no terminal.

    The first line of a stage comes when it has taken `_QUICK_S`. Another line comes every `_LINE_S` seconds, or after
    a twentieth of the stage's time where that is longer, whether a part was done meanwhile or not; and at the end of a
    stage that took `_LINE_S` or more.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, is_long: bool = False) -> None:
        """Prints nothing yet; see `stages` for the arguments."""
        self._clock, self._is_long, self._lock = clock, is_long, threading.Lock()
        self._pace = Pace(clock)
        self._stage, self._done, self._total, self._unit = "", 0, None, ""
        self._printed_s = -math.inf

    _total: int | None

    def __call__(self, stage: str, done: int = 0, total: int | None = None, unit: str = "") -> None:
        """Notes how far a stage is; see `Report`."""
        with self._lock:
            if stage != self._stage:
                self._begin(stage)
            self._pace.reach(done)
            is_end = total is not None and done >= total > self._done
            self._done, self._total, self._unit = done, total, unit
            if self._is_due() or (is_end and self._pace.elapsed_s >= _LINE_S):
                self._print()

    def look(self) -> None:
        """Prints a line if one is due. This is called every half second."""
        with self._lock:
            if self._stage and not self._is_over() and self._is_due():
                self._print()

    def end(self) -> None:
        """Prints no further line."""
        with self._lock:
            self._stage = ""

    def _begin(self, stage: str) -> None:
        is_first = not self._stage
        self._stage, self._done, self._total, self._printed_s = stage, 0, None, -math.inf
        self._pace.begin()
        if is_first and self._is_long:
            self._printed_s = self._clock()
            to_stderr(f"{stage} ...")

    def _is_over(self) -> bool:
        return self._total is not None and self._done >= self._total

    def _is_due(self) -> bool:
        wait_s = max(_LINE_S, self._pace.elapsed_s / 20)
        return self._pace.elapsed_s >= _QUICK_S and self._clock() - self._printed_s >= wait_s

    def _print(self) -> None:
        self._printed_s = self._clock()
        elapsed, left = self._pace.shown(self._total)
        if self._total is None:
            to_stderr(f"{self._stage} ...  {elapsed} elapsed")
        else:
            parts = f"{self._done}/{self._total} {self._unit}".rstrip()
            to_stderr(f"{self._stage} {parts}  {elapsed} elapsed, {left} left")
