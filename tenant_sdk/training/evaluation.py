"""This module evaluates an adapter during a run: its loss and accuracy on rows that the run does not train on.

Guarantees: an evaluation asks the provider for forward passes of the same rows in the same order each time, in batches
as large as the run's; the steps at which it does so follow from settings alone. Logits of a whole batch never exist at
once. A loss that is not finite is treated like any other such value (tenant_sdk/model/planned_calls.py).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import TrainerCallback

from tenant_sdk.model.planned_calls import Course
from tenant_sdk.training.result import Evaluation
from tenant_sdk.training.token_scores import Scores

_PREFIX = "eval_"
_LOSS = f"{_PREFIX}loss"
_TIMES = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "num_tokens")
"""Entries that Trainer and TRL add to an evaluation and that measure no quality."""


class EvaluatesInChunks:
    """Is a mixin of transformers' Trainer, for a model that `score_tokens` has changed.

    An evaluation's loss is that of the stock Trainer: the mean of the batches' losses. Its accuracy is the part of all
    labelled tokens that the model finds likeliest.
    """

    _num_right = 0
    _num_labels = 0

    def prediction_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, None, None]:
        """Returns (the batch's mean loss over labelled tokens, None, None); the stock method gives logits and labels
        too."""
        trainer: Any = self
        inputs = trainer._prepare_inputs(inputs)
        with torch.no_grad(), trainer.compute_loss_context_manager():
            scores: Scores = model(**inputs, **trainer.without_cache(model), fused_lm_head=True)
        num_labels = int(scores.label_mask.sum())
        self._num_right += int((scores.is_top1 & scores.label_mask).sum())
        self._num_labels += num_labels
        return -scores.log_probs.sum() / max(num_labels, 1), None, None

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Runs the stock loop, and adds accuracy and perplexity to its metrics."""
        self._num_right = self._num_labels = 0
        trainer: Any = super()
        output = trainer.evaluation_loop(*args, **options)
        loss = output.metrics[_LOSS]
        output.metrics[f"{_PREFIX}accuracy"] = self._num_right / max(self._num_labels, 1)
        output.metrics[f"{_PREFIX}perplexity"] = math.exp(min(loss, 700.0)) if loss == loss else math.nan
        return output


class EvaluateAtTheEnd(TrainerCallback):  # type: ignore[misc]
    """Asks for an evaluation after the last step too, and passes each evaluation's loss to the run's `Course`, which
    decides what happens if a value is not finite (tenant_sdk/model/planned_calls.py)."""

    def __init__(self, course: Course) -> None:
        """Takes the run's course, which records whether a value was not finite."""
        self._course = course

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Asks for an evaluation after the last planned step."""
        if state.global_step >= state.max_steps:
            control.should_evaluate = True

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """Checks the loss of an evaluation."""
        self._course.check([torch.tensor(float((metrics or {}).get(_LOSS, 0.0)))])


def evaluations(history: list[dict[str, float]]) -> list[Evaluation]:
    """Returns the evaluations of a run, in order.

    Args:
        history: the `log_history` of a Trainer's state.
    """
    return [
        Evaluation(
            step=int(entry["step"]),
            loss=float(entry[_LOSS]),
            metrics={
                key.removeprefix(_PREFIX): float(value)
                for key, value in entry.items()
                if key.startswith(_PREFIX) and key != _LOSS and key.removeprefix(_PREFIX) not in _TIMES
            },
        )
        for entry in history
        if _LOSS in entry
    ]
