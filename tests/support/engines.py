"""Stops an engine in the middle of a step, and records its logits and the adapters that it computes together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tenant_sdk import TenantClient
from tenant_sdk.serving.engine import Engine

TIMEOUT_S = 60.0
"""The seconds after which a test of an engine gives up."""


class Gate:
    """Acts as a logits hook that stops the engine in the middle of a step until the test opens the gate."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.reached.set()
        assert self.open.wait(TIMEOUT_S)
        return scores


@dataclass
class Recorder:
    """Records the logits of each step. If it was given tokens, it also makes the model choose exactly these tokens."""

    forced: Sequence[int] | None = None
    logits: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.logits.append(scores[0].clone())
        if self.forced is None:
            return scores
        chosen = torch.full_like(scores, -torch.inf)
        chosen[0, self.forced[len(self.logits) - 1]] = 0.0
        return chosen

    @property
    def stacked(self) -> torch.Tensor:
        """Returns the recorded logits as one tensor, shape (num_tokens, vocab_size)."""
        return torch.stack(self.logits)


def alone(client: TenantClient, prompt: str, num_new: int, adapter: Path | None = None) -> torch.Tensor:
    """Returns the logits of `client.generate` for one prompt, shape (num_tokens, vocab_size)."""
    recorder = Recorder()
    client.generate(prompt, adapter, max_new_tokens=num_new, eos_token_id=[], logits_processor=[recorder])
    return recorder.stacked


def together(
    engine: Engine, prompts: Sequence[str], answers: Sequence[torch.Tensor], adapters: Sequence[str | None] = (),
    **options: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """Returns the engine's logits for all these prompts at once, each with its own adapter, or all with the base model.
    The engine is made to choose the likeliest tokens of `answers`."""
    recorders = [Recorder(answer.argmax(dim=-1).tolist()) for answer in answers]
    names = adapters or [None] * len(prompts)
    submitted = [
        engine.submit(prompt, name, max_new_tokens=len(answer), eos_token_id=[], logits_processor=[recorder], **options)
        for prompt, name, answer, recorder in zip(prompts, names, answers, recorders, strict=True)
    ]
    for answer in submitted:
        answer.result(TIMEOUT_S)
    return [recorder.stacked for recorder in recorders]


def mean_kl(reference: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> float:
    """Returns the mean of KL(reference, got) over all positions, in nats."""
    p, q = (torch.cat(list(each)).double().log_softmax(dim=-1) for each in (reference, got))
    return float((p.exp() * (p - q)).sum(dim=-1).mean())
