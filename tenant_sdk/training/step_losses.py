"""This module tells other code the loss of each optimizer step as soon as Trainer knows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback


class StepLosses(TrainerCallback):  # type: ignore[misc]
    """Calls a function with the number (from 1) and the loss of each optimizer step."""

    def __init__(self, on_step: Callable[[int, float], None]) -> None:
        """Keeps the function, which must return quickly: the next step waits for it."""
        self._on_step = on_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Passes on the loss of the step that was logged."""
        if logs and "loss" in logs:
            self._on_step(int(state.global_step), float(logs["loss"]))
