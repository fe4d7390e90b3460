"""This module defines the result of a fine-tuning run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Evaluation:
    """Holds what one evaluation of a run found, on rows that the run does not train on.

    Attributes:
        step: the number of optimizer steps before the evaluation.
        loss: the mean of the batches' losses, each the mean over its labelled tokens, or over its preferences.
        metrics: `accuracy` (the part of labelled tokens that the model finds likeliest) and `perplexity`; for
            preferences TRL's metrics, such as `rewards/accuracies` and `rewards/margins`.
    """

    step: int
    loss: float
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class FinetuneResult:
    """Holds the result of a fine-tuning run.

    Attributes:
        adapter_dir: the folder with PEFT's files, which `PeftModel.from_pretrained(base, adapter_dir)` loads.
        losses: mean loss per labelled token, or per preference, of each optimizer step, in order; a resumed run has the
            losses of all steps.
        tokens: number of tokens trained on in this call, without padding; those of steps that were made again count
            twice.
        bytes_up, bytes_down: bytes sent to and received from the providers in this call.
        seconds: wall-clock time of this call's training.
        resumed_from_step: the optimizer step of the checkpoint that the run was resumed from; 0 if there was none.
        evaluations: the evaluations, in order; empty without `eval_data`.
        adapter_step: the optimizer step after which the adapter was as it was written: the last one, or with
            `keep_best` that of the evaluation with the least loss.
        num_waits: how often this call waited for a provider that went away, and went on from a checkpoint. `tokens`,
            bytes and `seconds` count all that was done, also what was lost and the waits.
    """

    adapter_dir: Path
    losses: list[float] = field(repr=False)
    tokens: int
    bytes_up: int
    bytes_down: int
    seconds: float
    resumed_from_step: int = 0
    evaluations: list[Evaluation] = field(default_factory=list, repr=False)
    adapter_step: int = 0
    num_waits: int = 0
