"""This module computes the rows of one step with the model, and returns a result for each request.

Guarantees: a value that is not finite is reported only for the request that has this value in one of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from tenant_sdk.serving.adapter_slots import AdapterSlots
from tenant_sdk.serving.kv import KvLayout, RequestKv
from tenant_sdk.serving.ragged import RaggedModel
from tenant_sdk.serving.requests import Request
from tenant_sdk.serving.scheduler import Step
from tenant_sdk.serving.speculation.drafter import Drafter


@dataclass(frozen=True)
class SegmentResult:
    """Holds the result of a segment, which is the rows of one request in a step.

    Attributes:
        logits: the logits of the next token, float32, shape (num_wanted, vocab_size), with a row for each row of the
            segment whose logits are wanted; None if the prompt is not complete yet.
        is_finite: whether all last hidden states are finite, and each row of logits has a finite maximum, so that
            single logits may be minus infinity.
    """

    logits: torch.Tensor | None = field(repr=False)
    is_finite: bool


class StepRunner:
    """Computes steps with one model, its adapters and its keys and values."""

    def __init__(
        self, model: RaggedModel, layout: KvLayout, slots: AdapterSlots, kv_device: torch.device,
        drafter: Drafter | None = None,
    ) -> None:  # fmt: skip
        """Keeps the model, the layout and the store with which steps are computed.

        Args:
            model: the model that computes the rows.
            layout: the layout of the keys and values that requests get.
            slots: the store of adapters.
            kv_device: the device on which requests' keys and values are kept.
            drafter: drafts tokens before each step; None without speculation.
        """
        self._model, self._layout, self._slots, self._drafter = model, layout, slots, drafter
        self._device: torch.device = model.model.device
        self._kv_device = kv_device

    def run(self, step: Step, requests: Sequence[Request]) -> list[SegmentResult]:
        """Drafts tokens if there is a drafter, computes the step, and adds the new keys and values to those of the
        step's requests.

        Args:
            step: the segments to compute.
            requests: the request of each segment.

        Returns:
            The result of each segment.

        Raises:
            VeilbaseError: a call to the provider failed, or the engine does not serve the model.
        """
        if self._drafter is not None:
            self._drafter.draft(step.segments, requests)
        rows = [request.rows(segment) for segment, request in zip(step.segments, requests, strict=True)]
        pieces = [
            request.piece(segment, self._make_kv) for segment, request in zip(step.segments, requests, strict=True)
        ]
        with self._slots.in_step(step.slot_of_row):
            logits, is_finite = self._model.forward(
                pieces,
                self._numbers([token_id for ids, _ in rows for token_id in ids]),
                self._numbers([position for _, positions in rows for position in positions]),
                self._numbers(_wanted(step)),
                lambda hidden: _pool(step, requests, hidden),
            )
        return _results(step, logits, is_finite)

    def _numbers(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _make_kv(self, num_tokens: int) -> RequestKv:
        return RequestKv(self._layout, num_tokens, self._kv_device)


def _wanted(step: Step) -> list[int]:
    """Returns the indices of the rows whose logits are wanted."""
    ends = accumulate(segment.num_rows for segment in step.segments)
    return [
        row for segment, end in zip(step.segments, ends, strict=True) for row in range(end - segment.num_wanted, end)
    ]


def _pool(step: Step, requests: Sequence[Request], hidden: torch.Tensor) -> None:
    """Gives each request the last hidden states of its rows, from those of all rows, shape (num_rows, hidden_size)."""
    begin = 0
    for segment, request in zip(step.segments, requests, strict=True):
        request.pool(segment, hidden[begin : begin + segment.num_rows])
        begin += segment.num_rows


def _results(step: Step, logits: torch.Tensor, is_finite: torch.Tensor) -> list[SegmentResult]:
    """Returns the result of each segment.

    Args:
        logits: the rows that `_wanted` names, shape (num_wanted, vocab_size).
        is_finite: one flag for each row of the step, shape (num_rows,).
    """
    largest_finite = torch.isfinite(logits.amax(dim=-1)).tolist()  # The maximum of a row with NaN is NaN.
    finite_rows = is_finite.tolist()
    results, begin, index = [], 0, 0
    for segment in step.segments:
        ok = all(finite_rows[begin : begin + segment.num_rows])
        begin += segment.num_rows
        if segment.samples:
            own = slice(index, index + segment.num_wanted)
            results.append(SegmentResult(logits[own], ok and all(largest_finite[own])))
            index = own.stop
        else:
            results.append(SegmentResult(None, ok))
    return results
