"""Lets the rows of one step go through the model, and tells for each request what came of its own.

Guarantees: a value that is not finite is told of the request whose row it is in, and of no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from tenant_sdk.serving.adapter_slots import AdapterSlots
from tenant_sdk.serving.kv import KvLayout, RequestKv
from tenant_sdk.serving.ragged import RaggedModel
from tenant_sdk.serving.requests import Request
from tenant_sdk.serving.scheduler import Step


@dataclass(frozen=True)
class SegmentResult:
    """What came of a segment.

    Attributes:
        logits: of the next token, float32, shape (vocab_size,); None where the prompt goes on.
        is_finite: whether all hidden states and logits are; a logit may be minus infinity.
    """

    logits: torch.Tensor | None = field(repr=False)
    is_finite: bool


class StepRunner:
    """Computes steps with one model, its adapters and its KV."""

    def __init__(self, model: RaggedModel, layout: KvLayout, slots: AdapterSlots) -> None:
        """Args: model: computes; layout: of the KV that requests get; slots: the adapters."""
        self._model, self._layout, self._slots = model, layout, slots
        self._device: torch.device = model.model.device

    def run(self, step: Step, requests: Sequence[Request]) -> list[SegmentResult]:
        """Computes a step.

        Args:
            step: what goes through the model.
            requests: the request of each segment.

        Returns:
            What came of each segment.
        """
        rows = [request.rows(segment) for segment, request in zip(step.segments, requests, strict=True)]
        pieces = [
            request.piece(segment, self._make_kv) for segment, request in zip(step.segments, requests, strict=True)
        ]
        ends = torch.tensor([segment.num_rows for segment in step.segments]).cumsum(0)
        samples = torch.tensor([segment.samples for segment in step.segments])
        with self._slots.in_step(step.slot_of_row):
            logits, is_finite = self._model.forward(
                pieces,
                self._numbers([token_id for ids, _ in rows for token_id in ids]),
                self._numbers([position for _, positions in rows for position in positions]),
                (ends[samples] - 1).to(self._device),
            )
        return _results(step, logits, is_finite)

    def _numbers(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _make_kv(self, num_tokens: int) -> RequestKv:
        return RequestKv(self._layout, num_tokens, self._device)


def _results(step: Step, logits: torch.Tensor, is_finite: torch.Tensor) -> list[SegmentResult]:
    """Args: logits: one row for each segment that samples; is_finite: one flag for each row of the step."""
    largest_finite = torch.isfinite(logits.amax(dim=-1)).tolist()  # a NaN in a row becomes its maximum
    finite_rows = is_finite.tolist()
    results, begin, index = [], 0, 0
    for segment in step.segments:
        ok = all(finite_rows[begin : begin + segment.num_rows])
        begin += segment.num_rows
        if segment.samples:
            results.append(SegmentResult(logits[index], ok and largest_finite[index]))
            index += 1
        else:
            results.append(SegmentResult(None, ok))
    return results
