"""Splits weights with FSDP2 as in the Symbiosis paper, for comparison with tensor parallelism.

Every rank holds some rows of each weight, and all ranks gather the whole weight for every product. Each rank then
computes some of the request's rows, as in data parallelism. So if a request has a single row, rank 0 alone computes its
product, although all ranks spend time on gathering the weight. Source: Symbiosis, section on sharding with FSDP;
PyTorch's `fully_shard`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from provider.engine import products
from provider.model.served_group import ServedGroup
from provider.model.weights import PreparedModel
from provider.parallel.ranks import Ranks, together
from provider.parallel.sharding import Block, split, without_weights
from wire.frame import Call
from wire.ring.seeded_rows import Rows, SeededRows


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
