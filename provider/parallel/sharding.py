"""Splits weights over ranks by tensor parallelism, behind an interface (`Sharding`) that provider/parallel/dispatch.py
uses. provider/parallel/fsdp.py has another way behind the same interface, for comparison.

Tensor parallelism (`ColumnSlices`): every rank holds a slice of the columns of each layer group's weight, so that
layers may be too large for one device. In forward calls, each rank multiplies the rows by its slice, and the results
are concatenated along the columns. In backward calls, each rank multiplies the matching columns of the rows by its
transposed slice, and the results are added. In ring arithmetic this is exact, since addition mod 2^32 does not depend
on the order. In float it is exact up to rounding.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from provider.engine import products
from provider.model.served_group import ServedGroup
from provider.model.weights import PreparedModel
from wire.frame import Arithmetic, Call, Direction
from wire.ring.seeded_rows import Rows, SeededRows


@dataclass(frozen=True)
class Block:
    """Names the part of a reply that one rank computes: a range of rows and a range of columns."""

    rows: range
    columns: range

    @property
    def shape(self) -> tuple[int, int]:
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


class ColumnSlices:
    """Holds one rank's columns of every group's weight, as a `provider.parallel.sharding.Sharding`."""

    def __init__(self, served: PreparedModel, rank: int, size: int) -> None:
        """Copies this rank's slices out of the whole weights; the caller should drop `served` afterwards.

        Args:
            served: the model with whole weights.
            rank, size: this process's rank, and the number of ranks.
        """
        self._infos = [group.info for group in served.groups]
        self._columns = [split(info.out_features, size) for info in self._infos]
        self._rank = rank
        slices = (_slice(group, columns[rank]) for group, columns in zip(served.groups, self._columns, strict=True))
        self._narrow = PreparedModel(served.manifest, tuple(slices), served.bundle)

    @property
    def weight_bytes(self) -> int:
        return self._narrow.weight_bytes

    def adds(self, call: Call) -> bool:
        """Returns True for backward calls: each rank multiplies only some of the rows' columns, so the ranks' products
        must be added. Returns False for forward calls."""
        return call.direction is Direction.BACKWARD

    def blocks(self, call: Call, num_rows: int) -> list[Block]:
        """Returns the block of the reply that each rank computes: some of the columns for forward calls. For backward
        calls each block is the whole reply, since the ranks' parts are added."""
        if self.adds(call):
            whole = Block(range(num_rows), range(self._infos[call.group].in_features))
            return [whole] * len(self._columns[call.group])
        return [Block(range(num_rows), columns) for columns in self._columns[call.group]]

    def weights(self, call: Call) -> AbstractContextManager[None]:
        """Returns an empty context, since this rank always holds its slice."""
        return nullcontext()

    def share(self, call: Call, rows: Rows) -> torch.Tensor:
        """Computes the product of a request's rows and this rank's columns of the weight.

        Args:
            call: a call that has passed rank 0's checks.
            rows: all rows of the request, shape (num_rows, in_features), or (num_rows, out_features) for backward
                calls; or the seed of the rows.

        Returns:
            For forward calls, shape (num_rows, columns of this rank). For backward calls, this rank's summand, shape
            (num_rows, in_features).
        """
        if call.direction is Direction.FORWARD:
            return products.compute(self._narrow, call, rows)
        info, columns = self._infos[call.group], self._columns[call.group][self._rank]
        if isinstance(rows, SeededRows):
            weight = self._narrow.groups[call.group].quantised.t()
            return products.seeded_product(weight, rows, columns, info.out_features)
        if not columns:  # There are fewer columns than ranks.
            return torch.zeros(rows.shape[0], info.in_features, dtype=rows.dtype)
        part = rows[:, columns.start : columns.stop]
        return products.compute(self._narrow, call, part if call.arithmetic is Arithmetic.RING else part.contiguous())


def _slice(group: ServedGroup, columns: range) -> ServedGroup:
    """Returns a copy of a layer group with only the given columns of the weight. The copy's `info.out_features` is the
    number of these columns; the rest of `info` is as in the whole group."""
    kept = slice(columns.start, columns.stop)
    return replace(
        group,
        info=group.info.model_copy(update={"out_features": len(columns)}),
        quantised=_owned(group.quantised[:, kept]),
        alpha=_owned(group.alpha[kept]),
        bias=None if group.bias is None else _owned(group.bias[kept]),
        native=None if group.native is None else _owned(group.native[:, kept]),
    )


def _owned(view: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy of part of a weight, since a view would keep the whole weight in memory."""
    return view.clone(memory_format=torch.contiguous_format)
