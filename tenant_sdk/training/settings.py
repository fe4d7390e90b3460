"""This module defines and checks the settings of a fine-tuning run, and defines the run's result. A resumed run must
have the same settings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from wire.errors import ConfigurationError

_SCHEDULERS = ("linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt")
"""The learning-rate schedules of transformers that need no further argument."""
_DPO_LOSSES = ("sigmoid", "hinge", "ipo", "apo_zero", "apo_down", "sigmoid_norm")
"""The losses of TRL's DPOTrainer that need no further argument."""


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings:
    """Holds the settings of one run, which are part of the run's fingerprint; `TenantClient.finetune` describes the
    settings."""

    max_steps: int | None
    num_epochs: float = 3.0
    batch_size: int
    window_tokens: int | None = None
    gradient_accumulation_steps: int
    learning_rate: float
    lr_scheduler_type: str
    warmup_steps: int = 3
    weight_decay: float
    max_grad_norm: float
    save_steps: int
    seed: int
    bf16: bool = False
    eval_steps: int | None = None
    early_stopping_steps: int | None = None
    early_stopping_threshold: float = 0.0
    keep_best: bool = False
    dpo_beta: float = 0.1
    dpo_loss: str = "sigmoid"
    dpo_precompute_reference: bool = False

    @property
    def steps_of_evaluation(self) -> int:
        """Returns the number of optimizer steps between evaluations, by default that between checkpoints."""
        return self.save_steps if self.eval_steps is None else self.eval_steps

    def check(self) -> None:
        """Raises ConfigurationError for an impossible value, or for one that another setting leaves without effect;
        callers must call this method before they send rows or write files."""
        positive: tuple[str, ...] = ("num_epochs", "batch_size", "gradient_accumulation_steps", "save_steps")
        optional = ("max_steps", "window_tokens", "eval_steps", "early_stopping_steps")
        positive += ("learning_rate", "dpo_beta", *(name for name in optional if getattr(self, name) is not None))
        for name in positive:
            if not 0 < getattr(self, name) < math.inf:  # a NaN fails this too
                raise ConfigurationError(f"{name} must be positive, got {getattr(self, name)}")
        more = ("weight_decay", "max_grad_norm", "seed", "early_stopping_threshold")
        for name in ("warmup_steps", *more):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name} must be a finite number from 0, got {getattr(self, name)}")
        if self.seed >= 1 << 32:  # numpy's generator takes no more
            raise ConfigurationError(f"seed must be below 2^32, got {self.seed}")
        if self.lr_scheduler_type not in _SCHEDULERS:
            raise ConfigurationError(
                f"lr_scheduler_type must be one of {', '.join(_SCHEDULERS)}, got {self.lr_scheduler_type!r}"
            )
        if self.dpo_loss not in _DPO_LOSSES:
            raise ConfigurationError(f"dpo_loss must be one of {', '.join(_DPO_LOSSES)}, got {self.dpo_loss!r}")
        if self.lr_scheduler_type == "constant" and self.warmup_steps not in (0, FinetuneSettings.warmup_steps):
            raise ConfigurationError(
                "warmup_steps has no effect with lr_scheduler_type constant: choose constant_with_warmup, or leave it "
                "out"
            )
        if self.max_steps is not None and self.num_epochs != FinetuneSettings.num_epochs:
            raise ConfigurationError("num_epochs (--epochs) has no effect beside max_steps: leave one of them out")
        if self.keep_best and self.steps_of_evaluation != self.save_steps:
            raise ConfigurationError(
                f"keep_best takes the adapter from a checkpoint: expected eval_steps as save_steps, {self.save_steps}, "
                f"got {self.eval_steps}"
            )


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
        seconds: wall-clock time for hints, model, training, evaluations and waits, in this call; not for connecting,
            the check of the provider and reading the data.
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
