"""This module defines the result of a fine-tuning run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class FinetuneResult:
    """Holds the result of a fine-tuning run.

    Attributes:
        adapter_dir: the folder with PEFT's files, which `PeftModel.from_pretrained(base, adapter_dir)` loads.
        losses: mean loss per labelled token of each optimizer step, in order; a resumed run has the losses of all
            steps.
        tokens: number of tokens trained on in this call, without padding.
        bytes_up, bytes_down: bytes sent to and received from the providers in this call.
        seconds: wall-clock time of this call's training.
        resumed_from_step: the optimizer step of the checkpoint that the run was resumed from; 0 if there was none.
    """

    adapter_dir: Path
    losses: list[float] = field(repr=False)
    tokens: int
    bytes_up: int
    bytes_down: int
    seconds: float
    resumed_from_step: int = 0
