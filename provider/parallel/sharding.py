"""Defines how weights are split over ranks: the interface through which `dispatch` uses tensor parallelism and
FSDP2."""

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
    """Names the part of a reply that one rank computes: a range of rows and a range of columns."""

    rows: range
    columns: range

    @property
    def shape(self) -> tuple[int, int]:
        """Returns the numbers of rows and columns of the part."""
        return len(self.rows), len(self.columns)

    def of(self, reply: torch.Tensor) -> torch.Tensor:
        """Returns a view of `reply`, the whole reply, that has only the rows and columns of this part."""
        return reply[self.rows.start : self.rows.stop, self.columns.start : self.columns.stop]


class Sharding(Protocol):
    """Holds one rank's share of the weights, and computes this rank's part of every product."""

    def adds(self, call: Call) -> bool:
        """Returns True if the reply is the sum of all ranks' parts, False if each part is a separate block of the
        reply."""
        ...

    def blocks(self, call: Call, num_rows: int) -> list[Block]:
        """Returns the block of the reply for each rank, in the order of ranks; if parts are added, each block is the
        whole reply."""
        ...

    def weights(self, call: Call) -> AbstractContextManager[None]:
        """Returns a context in which `share` must be called. All ranks must enter their contexts for the same call,
        since entering may be a collective operation.

        Raises:
            RankLost: another rank is gone.
        """
        ...

    def share(self, call: Call, rows: Rows) -> torch.Tensor:
        """Computes this rank's part of a product, without a collective.

        Args:
            call: a call that has passed rank 0's checks.
            rows: all rows of the request, which must be finite, or their seed.

        Returns:
            The part that `blocks` names, or this rank's summand if `adds` is true.
        """
        ...


def split(length: int, parts: int) -> list[range]:
    """Splits a length into consecutive ranges like `torch.tensor_split`: if the length is not a multiple of `parts`,
    the first ranges are longer by one."""
    small, longer = divmod(length, parts)
    starts = [index * small + min(index, longer) for index in range(parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(starts)]


def without_weights(served: PreparedModel) -> PreparedModel:
    """Returns a copy of a model with empty weights, so that an attempt to multiply by them is an error.

    The weights are not put on the meta device, since `torch._int_mm` accepts meta tensors without an error.
    """
    no_int8, no_native = torch.empty(0, 0, dtype=torch.int8), torch.empty(0, 0)
    groups = tuple(replace(group, quantised=no_int8, native=no_native) for group in served.groups)
    return PreparedModel(served.manifest, groups, served.bundle)
