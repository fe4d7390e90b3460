"""This module shows on stderr how far training (step and loss) and long preparations are.

In a terminal there is a bar. Elsewhere, as in a log file or under a supervisor, there are lines: one for each step of
training, and one for each tenth of a preparation.

Guarantees: both times that are shown, the elapsed and the remaining one, are of one clock: together they are the time
that the whole is expected to take, which changes only when a step ends. The remaining time is known once one step has
ended, however long a step takes.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text
from transformers import TrainerCallback

_PARTS = 10
"""The number of lines that a preparation prints where there is no terminal, its first line apart."""


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

    @property
    def elapsed_s(self) -> float:
        """Returns the seconds since `begin`."""
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
    """Shows both times of a task."""

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def render(self, task: Task) -> Text:
        """Returns the elapsed and the remaining time."""
        elapsed, left = self._pace.shown(None if task.total is None else int(task.total))
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
        self._bar = Progress(
            TextColumn("fine-tuning"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"),
            _Times(self._pace), console=console,
        )  # fmt: skip
        self._task: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Starts the bar, at the step from which the run is resumed."""
        self._pace.begin(state.global_step)
        if self._has_bar:
            self._bar.start()
            self._task = self._bar.add_task("", total=state.max_steps, completed=state.global_step, loss="-")
        else:  # the first step may take minutes
            print(f"fine-tuning {state.global_step}/{state.max_steps} ...", file=sys.stderr, flush=True)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Moves the bar to the step that was logged, or prints its line."""
        if not logs or "loss" not in logs:
            return
        self._pace.reach(state.global_step)
        loss = f"{float(logs['loss']):.4f}"
        if self._has_bar:
            self._bar.update(self._task, completed=state.global_step, loss=loss)
        else:
            _line("fine-tuning", state.global_step, state.max_steps, self._pace, f"  loss {loss}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Moves the progress bar to its last step and ends it."""
        self._pace.reach(state.global_step)
        if self._has_bar:
            self._bar.update(self._task, completed=state.global_step)
        self.stop()

    def stop(self) -> None:
        """Ends the bar at its current step, for a run that failed; a second call does nothing."""
        if self._has_bar:  # without a terminal, rich would print an empty line
            self._bar.stop()


@contextlib.contextmanager
def counting(
    what: str, show: bool = True, console: Console | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int, int], None]]:
    """Shows on stderr how far a preparation is, unless `show` is false.

    Args:
        what: the label.
        show: whether anything is shown.
        console: where the bar appears, by default stderr; lines go to stderr in any case.
        clock: returns the present time in seconds.

    Yields:
        A function that takes the number of steps done and the number of all steps.
    """
    if not show:
        yield lambda done, total: None
        return
    console, pace = console or Console(stderr=True), Pace(clock)
    if not _has_bar(console):
        yield _lines(what, pace)
        return
    with Progress(
        TextColumn(what), BarColumn(), MofNCompleteColumn(), _Times(pace), console=console
    ) as bar:  # fmt: skip
        task = bar.add_task("", total=None)

        def report(done: int, total: int) -> None:
            pace.reach(done)
            bar.update(task, completed=done, total=total)

        yield report


def _lines(what: str, pace: Pace) -> Callable[[int, int], None]:
    """Returns a function like that of `counting`, which prints a line when a further tenth of the steps is done. The
    first line comes at once, since the first step may take long."""
    print(f"{what} ...", file=sys.stderr, flush=True)
    printed = 0

    def report(done: int, total: int) -> None:
        nonlocal printed
        pace.reach(done)
        part = _PARTS * done // total if total else 0
        if part > printed:
            printed = part
            _line(what, done, total, pace)

    return report
