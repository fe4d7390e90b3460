"""Tensor parallel: every rank holds a slice of each group's columns, for layers too big for one device.

Forward, a rank multiplies by its columns and the replies stand side by side. Backward, it takes the matching columns of
the rows, multiplies by its slice transposed, and the ranks' products are added: in ring arithmetic exactly, since
addition mod 2^32 has no order; in float within rounding.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from provider.engine import products
from provider.model.served_group import ServedGroup
from provider.model.weights import PreparedModel
from provider.parallel.sharding import Block, split
from wire.frame import Arithmetic, Call, Direction
from wire.ring.seeded_rows import Rows, SeededRows


class ColumnSlices:
    """One rank's columns of every group; a `provider.parallel.sharding.Sharding`."""

    def __init__(self, served: PreparedModel, rank: int, size: int) -> None:
        """Copies this rank's slices out of whole weights, which the caller then drops.

        Args:
            served: the whole weights.
            rank, size: this process's rank, and how many ranks there are.
        """
        self._infos = [group.info for group in served.groups]
        self._columns = [split(info.out_features, size) for info in self._infos]
        self._rank = rank
        slices = (_slice(group, columns[rank]) for group, columns in zip(served.groups, self._columns, strict=True))
        self._narrow = PreparedModel(served.manifest, tuple(slices), served.bundle)

    @property
    def weight_bytes(self) -> int:
        """Returns the bytes of memory that this rank's weights take."""
        return self._narrow.weight_bytes

    def adds(self, call: Call) -> bool:
        """Returns True for backward calls, since each rank has seen some of the columns only."""
        return call.direction is Direction.BACKWARD

    def blocks(self, call: Call, num_rows: int) -> list[Block]:
        """Returns columns side by side for forward calls, and summands for backward ones."""
        if self.adds(call):
            whole = Block(range(num_rows), range(self._infos[call.group].in_features))
            return [whole] * len(self._columns[call.group])
        return [Block(range(num_rows), columns) for columns in self._columns[call.group]]

    def weights(self, call: Call) -> AbstractContextManager[None]:
        """Does nothing, since the weights are here."""
        return nullcontext()

    def share(self, call: Call, rows: Rows) -> torch.Tensor:
        """Computes the product with this rank's columns.

        Args:
            call: a call that was checked.
            rows: shape (num_rows, features of the direction), or their seed.

        Returns:
            Forward, shape (num_rows, columns of this rank); backward, (num_rows, in_features), a summand.
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
    """Makes a group of some of the columns; its info has their number, and everything else of the whole."""
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
    """Returns a contiguous copy: a view would keep the whole weight in memory."""
    return view.clone(memory_format=torch.contiguous_format)
