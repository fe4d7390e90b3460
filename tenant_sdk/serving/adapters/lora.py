"""This module keeps LoRA factors in stacks, layer by layer, and adds the products B·A·x of many adapters at once.

DoRA adapters are in the same stacks. Their layers' outputs are multiplied by gains (host.py) first, and their B
has these gains as factors.

A place is room for one adapter on the device, in the stacks of one rank. The adapter index is the number of a place
over all ranks; 0 means no adapter. It is what vLLM calls the LoRA index.

Guarantees: a row gets the adapter of its adapter index and no other. Other rows change a row's result only by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch.nn import functional as F

from runtime.threads import one_core
from wire.errors import ConfigurationError

MOST_RUNS = 2
"""Up to this many adapters of one rank in a step are multiplied one after the other; more are multiplied by
`grouped_mm`. A group is the rows of one adapter. One group of 16 rows takes 19 µs in the first way and 41 µs in the
second (576 to 1536 features, one core). Two groups take 28 and 41 µs, and four groups 48 and 44 µs."""


MODULES = 0
"""The number that stands for the rank of the places of adapters that are kept as PEFT's modules. No LoRA has this
rank."""


class Stack:
    """Holds one layer's LoRA factors A and B for all places of one rank.

    Attributes:
        lora_a: A, shape (places, rank, inputs).
        lora_b: Bᵀ times the scaling, and for DoRA times the gains, shape (places, rank, outputs).
        places: for each place, A and then Bᵀ as one flat tensor.
        adapted: the places whose adapter adds to this layer. The factors of a place with another adapter are zero.
        scaled: the places whose adapter is DoRA.
    """

    def __init__(
        self, num_places: int, rank: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device,
        bias: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Allocates memory without writing to it. On a CPU, the system then gives memory only to places that are
        written.

        Args:
            num_places, rank: the number of places, and their rank.
            shape: (inputs, outputs) of the layer.
            dtype, device: dtype and device of the factors.
            bias: the layer's bias, which DoRA's gains do not multiply; None if the layer has none.
        """
        inputs, outputs = shape
        whole = torch.empty(num_places, rank * (inputs + outputs), dtype=dtype, device=device)
        self.lora_a = whole[:, : rank * inputs].view(num_places, rank, inputs)
        self.lora_b = whole[:, rank * inputs :].view(num_places, rank, outputs)
        self.places = whole.unbind(0)
        self.adapted: set[int] = set()
        self.scaled: set[int] = set()
        self._bias = bias  # of the layer, which gains do not multiply
        self._gains: torch.Tensor | None = None  # gains − 1, shape (places, outputs); zeros without DoRA

    def clear(self, place: int) -> None:
        """Makes a place add nothing to this layer."""
        self.places[place].zero_()
        self.set_gain(place, None)
        self.adapted.discard(place)

    def set_gain(self, place: int, gain: torch.Tensor | None) -> None:
        """Sets the factors of the layer's outputs for a place, shape (outputs,); None for an adapter without DoRA."""
        if gain is None:
            self.scaled.discard(place)
            if self._gains is not None:
                self._gains[place].zero_()
            return
        if self._gains is None:
            num_places, _, outputs = self.lora_b.shape
            self._gains = torch.zeros(num_places, outputs, dtype=torch.float32, device=self.lora_b.device)
        self._gains[place].copy_(gain - 1)
        self.scaled.add(place)

    def apply(self, rows: torch.Tensor, flat: torch.Tensor, segment: Segment, inputs: torch.Tensor) -> None:
        """Multiplies the output rows of a segment by DoRA's gains, and then adds B·A·x of each row's own adapter.

        Args:
            rows: the input of the layer, shape (rows of the step, inputs).
            flat: the output of the layer, shape (rows of the step, outputs), which is changed in place.
            segment: the rows with adapters of this stack.
            inputs: the same as `rows`, since LoRA does not change inputs.
        """
        self._scale(flat, segment)
        lora_a, lora_b = self.lora_a, self.lora_b
        if segment.offs is None:
            for run in segment.runs:
                inner = F.linear(rows[run.begin : run.end].to(lora_a.dtype), lora_a[run.place])
                flat[run.begin : run.end].add_(inner @ lora_b[run.place])
            return
        part = rows[segment.begin : segment.end].to(lora_a.dtype)
        # `grouped_mm` is one small product for each group. With two cores each of them wakes OpenMP's other thread,
        # which fell asleep while the step waited for the provider: a pass of SmolLM2-135M with 16 adapters of two rows
        # each took 685 ms on two cores and 149 ms on one, and with 16 rows each 1,091 and 560 ms.
        with one_core():
            inner = F.grouped_mm(part, lora_a.transpose(1, 2), offs=segment.offs)  # (rows of the segment, rank)
            added = F.grouped_mm(inner, lora_b, offs=segment.offs)
        flat[segment.begin : segment.end].add_(added)

    def _scale(self, flat: torch.Tensor, segment: Segment) -> None:
        """Multiplies the layer's outputs, without its bias, by the gains of the rows' own adapters."""
        if self._gains is None or not any(run.place in self.scaled for run in segment.runs):
            return
        part = flat[segment.begin : segment.end]
        gains = self._gains[segment.place_of_row]  # (rows of the segment, outputs)
        part.add_((part if self._bias is None else part - self._bias) * gains)


@dataclass(frozen=True)
class Run:
    """Describes the rows from `begin` to before `end` of a step, which share one adapter. `place` is the adapter's
    place in the stacks of its rank."""

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
        offs: for each place, the end of its rows within the segment, int32, shape (places,); None if there are at most
            `MOST_RUNS` runs, and for `MODULES`.
        place_of_row: the place of each row's adapter, int64, shape (rows of the segment,).
    """

    rank: int
    begin: int
    end: int
    runs: tuple[Run, ...]
    offs: torch.Tensor | None
    place_of_row: torch.Tensor


@dataclass(frozen=True)
class Step:
    """Describes one forward pass.

    Attributes:
        index_of_row: each row's adapter index, ascending.
        segments: the rows that have an adapter, by rank.
    """

    index_of_row: tuple[int, ...]
    segments: tuple[Segment, ...]

    @property
    def num_rows(self) -> int:
        """Returns the number of rows of the pass."""
        return len(self.index_of_row)


@dataclass(frozen=True)
class AdapterIndices:
    """Numbers the places for adapters on the device. Index 0 means no adapter; then each rank has `num_places`
    indices, the smallest rank first. `MODULES` may be one of the ranks."""

    ranks: tuple[int, ...]
    num_places: int

    def rank_for(self, rank: int) -> int | None:
        """Returns the smallest rank of the stacks that is at least an adapter's `rank`; None if all are smaller."""
        return next((each for each in self.ranks if each >= rank), None)

    def index(self, rank: int, place: int) -> int:
        """Returns the adapter index of a place in the stacks of a rank."""
        return 1 + self.ranks.index(rank) * self.num_places + place

    def place(self, index: int) -> tuple[int, int]:
        """Returns the rank of the stacks, and the place in these stacks, of an adapter index other than 0."""
        at, place = divmod(index - 1, self.num_places)
        return self.ranks[at], place

    def step(self, index_of_row: Sequence[int], device: torch.device) -> Step:
        """Groups the rows of a step by adapter and rank, once for all layers.

        Args:
            index_of_row: each row's adapter index, ascending.
            device: the device of the stacks.

        Raises:
            ConfigurationError: the rows are not sorted by their adapter indices.
        """
        if any(a > b for a, b in pairwise(index_of_row)):
            raise ConfigurationError("a step's rows were expected in the order of their adapter indices")
        runs, row = [], 0
        for index, rows in groupby(index_of_row):
            begin, row = row, row + len(list(rows))
            if index:
                rank, place = self.place(index)
                runs.append((rank, Run(place, begin, row)))
        segments = [
            self._segment(rank, tuple(run for _, run in group), device)
            for rank, group in groupby(runs, key=lambda each: each[0])
        ]
        return Step(tuple(index_of_row), tuple(segments))

    def _segment(self, rank: int, runs: tuple[Run, ...], device: torch.device) -> Segment:
        offs = None
        if len(runs) > MOST_RUNS and rank != MODULES:
            counts = torch.zeros(self.num_places, dtype=torch.int32)
            for run in runs:
                counts[run.place] = run.end - run.begin
            offs = counts.cumsum(0).int().to(device)
        rows = torch.tensor([run.place for run in runs]).repeat_interleave(
            torch.tensor([run.end - run.begin for run in runs])
        )
        return Segment(rank, runs[0].begin, runs[-1].end, runs, offs, rows.to(device))
