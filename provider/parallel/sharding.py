"""How weights are spread over ranks: what `dispatch` needs to know of tensor parallel and of FSDP2."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from provider.model.weights import PreparedModel
from wire.frame import Call
from wire.ring.seeded_rows import Rows


@dataclass(frozen=True)
class Block:
    """A part of a reply: the rows and the columns that one rank computes."""

    rows: range
    columns: range

    @property
    def shape(self) -> tuple[int, int]:
        """Returns the shape of the part."""
        return len(self.rows), len(self.columns)

    def of(self, reply: torch.Tensor) -> torch.Tensor:
        """Returns a view of this part of the whole reply."""
        return reply[self.rows.start : self.rows.stop, self.columns.start : self.columns.stop]


class Sharding(Protocol):
    """One rank's weights, and its share of every product."""

    def adds(self, call: Call) -> bool:
        """Tells whether the ranks' parts are added; otherwise they lie side by side."""
        ...

    def blocks(self, call: Call, num_rows: int) -> list[Block]:
        """Returns each rank's part of the reply, in the order of ranks; the whole of it where parts are added."""
        ...

    def weights(self, call: Call) -> AbstractContextManager[None]:
        """Surrounds `share`; all ranks enter it, since it may be a collective.

        Raises:
            RankLost: another rank is gone.
        """
        ...

    def share(self, call: Call, rows: Rows) -> torch.Tensor:
        """Computes this rank's part of a product, or its summand, without a collective.

        Args:
            call: a call that was checked.
            rows: all rows, finite; or their seed.
        """
        ...


def split(length: int, parts: int) -> list[range]:
    """Returns consecutive ranges as `torch.tensor_split` makes them: the first ones are longer by one where it is
    uneven."""
    small, longer = divmod(length, parts)
    starts = [index * small + min(index, longer) for index in range(parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def without_weights(served: PreparedModel) -> PreparedModel:
    """Returns what is served, without weights: code that multiplies by what is left gets an error.

    The weights are not tensors on the meta device, since `torch._int_mm` takes such a one without an error.
    """
    no_int8, no_native = torch.empty(0, 0, dtype=torch.int8), torch.empty(0, 0)
    groups = tuple(replace(group, quantised=no_int8, native=no_native) for group in served.groups)
    return PreparedModel(served.manifest, groups, served.bundle)
