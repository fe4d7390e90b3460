"""Splits weights over ranks, by tensor parallelism or with FSDP2, behind one interface (`Sharding`), which
provider/parallel/dispatch.py uses.

Tensor parallelism (`ColumnSlices`): every rank holds a slice of the columns of each layer group's weight, so that
layers may be too large for one device. In forward calls, each rank multiplies the rows by its slice, and the results
are concatenated along the columns. In backward calls, each rank multiplies the matching columns of the rows by its
transposed slice, and the results are added. In ring arithmetic this is exact, since addition mod 2^32 does not depend
on the order. In float it is exact up to rounding.

FSDP2 (`GatheredLayers`), as in the Symbiosis paper, for comparison: every rank holds some rows of each weight, and all
ranks gather the whole weight for every product. Each rank then computes some of the request's rows, as in data
parallelism. So if a request has a single row, rank 0 alone computes its product, although all ranks spend time on
gathering the weight. Source: Symbiosis, section on sharding with FSDP; PyTorch's `fully_shard`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from provider.engine import products
from provider.model.served_group import ServedGroup
from provider.model.weights import PreparedModel
from provider.parallel.ranks import Ranks, together
from wire.frame import Arithmetic, Call, Direction
from wire.ring.seeded_rows import Rows, SeededRows


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


class GatheredLayers:
    """Holds one rank's rows of every weight, as a `provider.parallel.sharding.Sharding`."""

    def __init__(self, served: PreparedModel, ranks: Ranks) -> None:
        """Splits every weight over the ranks, and keeps this rank's rows; the caller should drop `served` afterwards.

        Args:
            served: the model with whole weights.
            ranks: the connections to the other ranks; all ranks must call this constructor at the same time.
        """
        self._served, self._rank, self._size = without_weights(served), ranks.rank, ranks.size
        mesh = DeviceMesh.from_group(ranks.group, "cpu")
        with together():
            self._layers = [_shard(group, mesh) for group in served.groups]

    @property
    def weight_bytes(self) -> int:
        """Returns how many bytes this rank's weights take while no weight is gathered."""
        parts = [p.to_local() for layer in self._layers for p in layer.parameters()]  # type: ignore[attr-defined]
        parts += [t for group in self._served.groups for t in (group.alpha, group.bias) if t is not None]
        return sum(part.numel() * part.element_size() for part in parts)

    def adds(self, call: Call) -> bool:
        """Returns False: the ranks' parts need not be added, since each rank multiplies by the whole weight."""
        return False

    def blocks(self, call: Call, num_rows: int) -> list[Block]:
        """Returns the block of the reply that each rank computes: some of the rows, with all columns."""
        _, reply_cols = self._served.groups[call.group].info.widths(call.direction)
        return [Block(rows, range(reply_cols)) for rows in split(num_rows, self._size)]

    @contextmanager
    def weights(self, call: Call) -> Iterator[None]:
        """Gathers the whole weight of the call's layer group from all ranks, and frees it after the `with` block."""
        layer = self._layers[call.group]
        with together():
            layer.unshard()
        try:
            yield
        finally:
            layer.reshard()

    def share(self, call: Call, rows: Rows) -> torch.Tensor:
        """Computes the product of the whole weight and this rank's rows of a request. The result has the shape (rows of
        this rank, columns of the reply)."""
        layer, group = self._layers[call.group], self._served.groups[call.group]
        whole = replace(group, quantised=layer.quantised.data, native=getattr(layer, "native", None))
        served = PreparedModel(self._served.manifest, (whole,), self._served.bundle)
        return products.compute(served, replace(call, group=0), self._own_rows(rows))

    def _own_rows(self, rows: Rows) -> Rows:
        if isinstance(rows, SeededRows):
            own = split(rows.num_rows, self._size)[self._rank]
            return SeededRows(rows.seed, rows.first_row + own.start, len(own))
        own = split(rows.shape[0], self._size)[self._rank]
        return rows[own.start : own.stop]


class _Layer(FSDPModule, nn.Module):
    """Describes, for the type checker, the module that `fully_shard` returns."""

    quantised: nn.Parameter


def _shard(group: ServedGroup, mesh: DeviceMesh) -> _Layer:
    layer = nn.Module()
    layer.quantised = nn.Parameter(group.quantised, requires_grad=False)
    if group.native is not None:
        layer.native = nn.Parameter(group.native, requires_grad=False)
    return fully_shard(layer, mesh=mesh, reshard_after_forward=True)  # type: ignore[return-value]


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
        """Returns how many bytes this rank's weights take."""
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
