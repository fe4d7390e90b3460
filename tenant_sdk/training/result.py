"""What a fine-tuning run gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class FinetuneResult:
    """What a fine-tuning run gave.

    Attributes:
        adapter_dir: PEFT's own files; `PeftModel.from_pretrained(base, adapter_dir)` loads them.
        losses: mean loss per labelled token of each optimizer step, in order; after a resume, of all steps.
        tokens: tokens trained on in this call, padding not counted.
        bytes_up, bytes_down: what crossed the wire in this call.
        seconds: wall clock of this call's training.
        resumed_from_step: 0 for a run that started afresh.
    """

    adapter_dir: Path
    losses: list[float] = field(repr=False)
    tokens: int
    bytes_up: int
    bytes_down: int
    seconds: float
    resumed_from_step: int = 0
