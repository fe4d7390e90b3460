"""This module adds, to each row of a linear layer's output, the LoRA product B·A·x of the row's own adapter and input.

Guarantees: a row gets the adapter of its slot and no other. Other rows change a row's result only by rounding. The
layer itself gets the same tensor object as without adapters, so that the provider receives the same calls, and the same
layers share a call. If a layer is adapted in a step but gets another number of rows than the step has, the call fails.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from wire.errors import ConfigurationError, InvalidTensor

MOST_RUNS = 2
"""Up to this many adapters of one rank in a step are multiplied one after the other; more are multiplied by
`grouped_mm`. One group of 16 rows takes 19 µs in the first way and 41 µs in the second (576 to 1536 features, one
core). Two groups take 28 and 41 µs, and four groups 48 and 44 µs."""


class Stack:
    """Holds one layer's LoRA factors A and B for all slots (places for adapters on the device) of one rank.

    Attributes:
        lora_a: A, shape (slots, rank, inputs).
        lora_b: Bᵀ times the scaling, shape (slots, rank, outputs).
        places: for each slot, A and then Bᵀ as one flat tensor.
        adapted: the slots whose adapter adds to this layer. The factors of a slot with another adapter are zero.
    """

    def __init__(
        self, num_slots: int, rank: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:  # fmt: skip
        """Allocates memory without writing to it. On a CPU, the system then gives memory only to slots that are
        written."""
        inputs, outputs = shape
        whole = torch.empty(num_slots, rank * (inputs + outputs), dtype=dtype, device=device)
        self.lora_a = whole[:, : rank * inputs].view(num_slots, rank, inputs)
        self.lora_b = whole[:, rank * inputs :].view(num_slots, rank, outputs)
        self.places = whole.unbind(0)
        self.adapted: set[int] = set()


@dataclass(frozen=True)
class Run:
    """Describes the rows `begin` to `end` of a step, which share one adapter. `place` is the adapter's index in the
    stacks of its rank."""

    place: int
    begin: int
    end: int


@dataclass(frozen=True)
class Segment:
    """Describes the rows of a step whose adapters are in stacks of one rank.

    Attributes:
        rank: the rank of the stacks, to which the adapters are padded.
        begin, end: the range of these rows among all rows of the step.
        runs: the runs of rows with one adapter, in order.
        offs: for each slot, the end of its rows within the segment, int32, shape (slots,); None if there are at most
            `MOST_RUNS` runs.
    """

    rank: int
    begin: int
    end: int
    runs: tuple[Run, ...]
    offs: torch.Tensor | None


@dataclass(frozen=True)
class Step:
    """Describes one forward pass: the number of its rows, and the adapter of each row."""

    num_rows: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class SlotNumbers:
    """Numbers the slots (places for adapters on the device). Number 0 means no adapter; then each rank has `num_slots`
    numbers, the smallest rank first."""

    ranks: tuple[int, ...]
    num_slots: int

    def rank_for(self, rank: int) -> int | None:
        """Returns the smallest rank of the stacks that is at least an adapter's `rank`; None if all are smaller."""
        return next((each for each in self.ranks if each >= rank), None)

    def slot(self, rank: int, place: int) -> int:
        """Returns the number of the slot with index `place` in the stacks of a rank."""
        return 1 + self.ranks.index(rank) * self.num_slots + place

    def place(self, slot: int) -> tuple[int, int]:
        """Returns the rank of a slot's stacks, and the slot's index in these stacks. The slot must not be 0."""
        index, place = divmod(slot - 1, self.num_slots)
        return self.ranks[index], place

    def step(self, slot_of_row: Sequence[int], device: torch.device) -> Step:
        """Groups the rows of a step by adapter and rank, once for all layers.

        Args:
            slot_of_row: each row's slot, ascending.
            device: the device of the stacks.

        Raises:
            ConfigurationError: the rows are not sorted by slot.
        """
        if any(a > b for a, b in pairwise(slot_of_row)):
            raise ConfigurationError("a step's rows were expected in the order of their slots")
        runs, row = [], 0
        for slot, rows in groupby(slot_of_row):
            begin, row = row, row + len(list(rows))
            if slot:
                rank, place = self.place(slot)
                runs.append((rank, Run(place, begin, row)))
        segments = [
            self._segment(rank, tuple(run for _, run in group), device)
            for rank, group in groupby(runs, key=lambda each: each[0])
        ]
        return Step(len(slot_of_row), tuple(segments))

    def _segment(self, rank: int, runs: tuple[Run, ...], device: torch.device) -> Segment:
        offs = None
        if len(runs) > MOST_RUNS:
            counts = torch.zeros(self.num_slots, dtype=torch.int32)
            for run in runs:
                counts[run.place] = run.end - run.begin
            offs = counts.cumsum(0).int().to(device)
        return Segment(rank, runs[0].begin, runs[-1].end, runs, offs)


class CurrentStep(threading.local):
    """Holds the step (one forward pass) that the current thread computes; None outside a step."""

    value: Step | None = None

    @contextlib.contextmanager
    def of(self, step: Step) -> Iterator[None]:
        """Makes `step` the current step inside the context, and restores the previous step afterwards."""
        before, self.value = self.value, step
        try:
            yield
        finally:
            self.value = before


class AdaptedLayer:
    """Adds adapters to the outputs of one linear layer of the model, and holds the layer's stacks by rank."""

    def __init__(self, name: str, layer: nn.Module, current: CurrentStep) -> None:
        """Registers a hook on the layer's outputs. The layer's inputs and calls do not change.

        Args:
            name: the layer's name in the model.
            layer: a Linear or Conv1D, local or remote.
            current: the step that each thread is computing.
        """
        self.name = name
        self._current = current
        self.stacks: dict[int, Stack] = {}
        self._handle = layer.register_forward_hook(self._after)

    def detach(self) -> None:
        """Removes the hook, so that the layer computes as before."""
        self._handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> AdaptedLayer:
        """Returns the same object, since a copied model gets its adapters from the same store."""
        return self

    def _after(self, layer: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        step = self._current.value
        if step is None or not self.stacks:
            return None
        segments = [segment for segment in step.segments if self._adds_to(segment)]
        return self.add(args[0], output, segments, step.num_rows) if segments else None

    def _adds_to(self, segment: Segment) -> bool:
        stack = self.stacks.get(segment.rank)
        return stack is not None and any(run.place in stack.adapted for run in segment.runs)

    def add(self, x: torch.Tensor, y: torch.Tensor, segments: Sequence[Segment], num_rows: int) -> torch.Tensor:
        """Returns y, with B·A·x of the row's adapter added to each row.

        Args:
            x: the layer's input, shape (..., inputs).
            y: the layer's output, shape (..., outputs). It is changed in place if it is contiguous and has no gradient.
            segments: the segments with an adapter that adds to this layer.
            num_rows: the number of rows of the step.

        Raises:
            InvalidTensor: x has another number of rows than the step, so the adapter of each row is unknown.
        """
        rows = x.reshape(-1, x.shape[-1])  # (rows, inputs)
        if rows.shape[0] != num_rows:
            raise InvalidTensor(f"{self.name} got {rows.shape[0]} rows in a step of {num_rows}")
        made = y.clone() if y.requires_grad or not y.is_contiguous() else y
        flat = made.view(-1, y.shape[-1])  # (rows, outputs)
        for segment in segments:
            _add_segment(rows, flat, segment, self.stacks[segment.rank])
        return made


def _add_segment(rows: torch.Tensor, flat: torch.Tensor, segment: Segment, stack: Stack) -> None:
    lora_a, lora_b = stack.lora_a, stack.lora_b
    if segment.offs is None:
        for run in segment.runs:
            inner = F.linear(rows[run.begin : run.end].to(lora_a.dtype), lora_a[run.place])
            flat[run.begin : run.end].add_(inner @ lora_b[run.place])
        return
    part = rows[segment.begin : segment.end].to(lora_a.dtype)
    inner = F.grouped_mm(part, lora_a.transpose(1, 2), offs=segment.offs)  # (segment rows, rank)
    flat[segment.begin : segment.end].add_(F.grouped_mm(inner, lora_b, offs=segment.offs))
