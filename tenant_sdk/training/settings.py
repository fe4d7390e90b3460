"""This module defines and checks the settings of a fine-tuning run; a resumed run must have the same settings."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wire.errors import ConfigurationError

_SCHEDULERS = ("linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt")
"""The learning-rate schedules of transformers that need no further argument."""


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings:
    """Holds the settings of one run, which are part of the run's fingerprint; `TenantClient.finetune` describes the
    settings."""

    max_steps: int | None
    num_epochs: float
    batch_size: int
    window_tokens: int | None = None
    gradient_accumulation_steps: int
    learning_rate: float
    lr_scheduler_type: str
    warmup_steps: int
    weight_decay: float
    max_grad_norm: float
    save_steps: int
    seed: int

    def check(self) -> None:
        """Raises ConfigurationError for an impossible value; callers must call this method before they send rows or
        write files."""
        positive: tuple[str, ...] = ("num_epochs", "batch_size", "gradient_accumulation_steps", "save_steps")
        positive += () if self.max_steps is None else ("max_steps",)
        positive += () if self.window_tokens is None else ("window_tokens",)
        for name in positive:
            if not 0 < getattr(self, name) < math.inf:  # a NaN fails this too
                raise ConfigurationError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("learning_rate", "warmup_steps", "weight_decay", "max_grad_norm", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name} must be a finite number from 0, got {getattr(self, name)}")
        if self.seed >= 1 << 32:  # numpy's generator takes no more
            raise ConfigurationError(f"seed must be below 2^32, got {self.seed}")
        if self.lr_scheduler_type not in _SCHEDULERS:
            raise ConfigurationError(
                f"lr_scheduler_type must be one of {', '.join(_SCHEDULERS)}, got {self.lr_scheduler_type!r}"
            )
