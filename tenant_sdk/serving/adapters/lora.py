"""Adds to a linear layer's output what each row's own LoRA adapter makes of its input.

Guarantees: a row gets the adapter of its slot and no other, and nothing of it depends on the other rows but by the
order of sums; the layer itself gets the same tensor object as without adapters, so the calls that go to a provider, and
which layers share one, stay the same. A layer that an adapter of the step adds to, and that gets other rows than the
step announced, refuses them.
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
"""Up to so many adapters in a step are multiplied one after the other. One group of 16 rows takes 19 µs so and 41 µs by
`grouped_mm` (576 to 1536 features, one core), two 28 and 41, four 48 and 44."""


class Stack:
    """Room for adapters of one rank at one layer.

    Attributes:
        lora_a: shape (slots, rank, inputs).
        lora_b: shape (slots, rank, outputs): Bᵀ times the scaling.
        places: for each slot, A and then Bᵀ in one piece of memory, flat.
        adapted: the slots whose adapter adds to this layer; the others are zero once they have an adapter.
    """

    def __init__(
        self, num_slots: int, rank: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:  # fmt: skip
        """Takes memory and leaves it as it is: on a CPU only what is written is ever taken."""
        inputs, outputs = shape
        whole = torch.empty(num_slots, rank * (inputs + outputs), dtype=dtype, device=device)
        self.lora_a = whole[:, : rank * inputs].view(num_slots, rank, inputs)
        self.lora_b = whole[:, rank * inputs :].view(num_slots, rank, outputs)
        self.places = whole.unbind(0)
        self.adapted: set[int] = set()


@dataclass(frozen=True)
class Run:
    """Rows of one adapter: `place` is its index in the stacks of its rank."""

    place: int
    begin: int
    end: int


@dataclass(frozen=True)
class Segment:
    """Rows whose adapters have one rank.

    Attributes:
        rank: the rank to which they are padded.
        begin, end: the rows, of all rows of the step.
        runs: the adapters, in order.
        offs: int32, shape (slots,): where each slot's rows end within the segment; None where the runs are few.
    """

    rank: int
    begin: int
    end: int
    runs: tuple[Run, ...]
    offs: torch.Tensor | None


@dataclass(frozen=True)
class Step:
    """One forward pass: how many rows it has and whose they are."""

    num_rows: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class SlotNumbers:
    """How slots are numbered: 0 is no adapter, then come `num_slots` for each rank, from the smallest."""

    ranks: tuple[int, ...]
    num_slots: int

    def rank_for(self, rank: int) -> int | None:
        """Returns the smallest rank of the stacks that takes an adapter; None where none does."""
        return next((each for each in self.ranks if each >= rank), None)

    def slot(self, rank: int, place: int) -> int:
        """Returns the number of a place in the stacks of a rank."""
        return 1 + self.ranks.index(rank) * self.num_slots + place

    def place(self, slot: int) -> tuple[int, int]:
        """Returns (rank, place) of a slot that is not 0."""
        index, place = divmod(slot - 1, self.num_slots)
        return self.ranks[index], place

    def step(self, slot_of_row: Sequence[int], device: torch.device) -> Step:
        """Sorts out whose the rows are, once for all layers.

        Args:
            slot_of_row: each row's slot, ascending.
            device: where the stacks are.

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
    """The step that this thread is in; None outside of one."""

    value: Step | None = None

    @contextlib.contextmanager
    def of(self, step: Step) -> Iterator[None]:
        """Makes a step the current one, and the one before it again at the end."""
        before, self.value = self.value, step
        try:
            yield
        finally:
            self.value = before


class AdaptedLayer:
    """A linear layer of the model, and the stacks of adapters that add to it."""

    def __init__(self, name: str, layer: nn.Module, current: CurrentStep) -> None:
        """Watches the layer's outputs; its inputs and its calls stay what they are.

        Args:
            name: the layer's name in the model.
            layer: a Linear or Conv1D, held here or at the provider.
            current: the step of each thread.
        """
        self.name = name
        self._current = current
        self.stacks: dict[int, Stack] = {}
        self._handle = layer.register_forward_hook(self._after)

    def detach(self) -> None:
        """Leaves the layer as it was."""
        self._handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> AdaptedLayer:
        """Returns itself: a copied model gets its adapters from the same store."""
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
        """Returns y plus what the adapters make of x.

        Args:
            x: the layer's input, shape (..., inputs).
            y: its output, shape (..., outputs); it is changed in place where no gradient needs it.
            segments: rows whose adapters add to this layer.
            num_rows: the rows of the step.

        Raises:
            InvalidTensor: x has another number of rows than the step, so nobody knows whose they are.
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
    inner = F.grouped_mm(part, lora_a.transpose(1, 2), offs=segment.offs)  # (rows of the segment, rank)
    flat[segment.begin : segment.end].add_(F.grouped_mm(inner, lora_b, offs=segment.offs))
