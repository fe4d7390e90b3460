"""This module shows progress bars on stderr for training (step and loss) and for long preparations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback


class ProgressBar(TrainerCallback):  # type: ignore[misc]
    """Shows the step and the loss of a Trainer in a progress bar."""

    def __init__(self) -> None:
        """Makes a bar that appears when training begins."""
        self._bar = Progress(
            TextColumn("fine-tuning"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True),
        )  # fmt: skip
        self._task: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Starts the bar, at the step from which the run is resumed."""
        self._bar.start()
        self._task = self._bar.add_task("", total=state.max_steps, completed=state.global_step, loss="-")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Moves the bar to the step that was logged."""
        if logs and "loss" in logs:
            self._bar.update(self._task, completed=state.global_step, loss=f"{float(logs['loss']):.4f}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Moves the progress bar to its last step and ends it."""
        self._bar.update(self._task, completed=state.global_step)
        self.stop()

    def stop(self) -> None:
        """Ends the bar at its current step, for a run that failed; a second call does nothing."""
        self._bar.stop()


@contextlib.contextmanager
def counting(what: str, show: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Shows a bar on stderr, unless `show` is false.

    Args:
        what: the bar's label.
        show: whether there is a bar.

    Yields:
        A function that moves the bar: it takes the number of steps done and the number of all steps.
    """
    if not show:
        yield lambda done, total: None
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
