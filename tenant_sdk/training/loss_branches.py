"""This module holds what makes a run's course depend on its losses: early stopping, and keeping the best adapter.

A provider whose replies are not verified can choose a loss by lying, and see what becomes of it: where a run ends, or
which adapter is released. What it sees may then tell about hidden data. So these options are refused unless replies are
verified, or there is nothing to hide from the provider (docs/threat-model.md, "A provider that lies").
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from tenant_sdk.session_protocol import TrainingSession
from tenant_sdk.training.evaluation import evaluations
from tenant_sdk.training.result import Evaluation
from tenant_sdk.training.settings import FinetuneSettings
from wire.errors import ConfigurationError


def check_loss_branches(session: TrainingSession, settings: FinetuneSettings, has_evaluation: bool) -> None:
    """Refuses options that depend on losses where a provider could steer them, or where nothing is evaluated.

    Raises:
        ConfigurationError: such an option is set; the text says what would allow it.
    """
    chosen = [name for name in ("early_stopping_steps", "keep_best") if getattr(settings, name)]
    if not chosen:
        return
    if not has_evaluation:
        raise ConfigurationError(f"{chosen[0]} needs an evaluation: name rows with eval_data (--eval-data)")
    if session.can_be_steered:
        raise ConfigurationError(
            f"{chosen[0]} lets losses decide, and a provider that lies could choose them and see the decision: name a "
            "checkpoint that you trust (verify=, --verify), or leave it out"
        )


class StopEarly(TrainerCallback):  # type: ignore[misc]
    """Ends a run when the evaluation's loss has not fallen for some optimizer steps.

    The decision follows from the history in the run's checkpoints, so a resumed run ends where an uninterrupted one
    does. The threshold works as in transformers' EarlyStoppingCallback: a loss counts as progress if it is below
    every earlier one by more than the threshold.
    """

    def __init__(self, num_steps: int, threshold: float) -> None:
        """Stops after `num_steps` steps without progress of more than `threshold`."""
        self._num_steps, self._threshold = num_steps, threshold

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends the run if there was no progress for long enough."""
        if steps_without_progress(evaluations(state.log_history), self._threshold) >= self._num_steps:
            control.should_training_stop = True


def steps_without_progress(history: list[Evaluation], threshold: float) -> int:
    """Returns the optimizer steps from the last evaluation that made progress to the last one; 0 without
    evaluations. If none made progress, it counts from step 0."""
    progressed_at, best = 0, float("inf")
    for evaluation in history:
        if best - evaluation.loss > threshold:
            progressed_at = evaluation.step
        best = min(best, evaluation.loss)
    return history[-1].step - progressed_at if history else 0
