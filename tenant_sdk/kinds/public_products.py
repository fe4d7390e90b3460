"""This module multiplies public rows by base weights, in the open, for numbers that become part of an adapter's file.

Under a mask such as `lattice`, noise is left in a product. If the product is published, and its rows are known, then
whoever knows the weight learns the noise, hence the mask's secret, and with it other rows under the same secret
(docs/threat-model.md, "Rows without a mask"). So an adapter's start is found with rows that hold nothing of the tenant:
unit rows, rows of random numbers that anyone can make again, and what follows from these and from the replies to them.
They need no mask, and no mask's noise is in their products.

Guarantees: with `verify` every reply is checked. The number of calls and rows depends on shapes only, whatever a
provider answers: numbers that are not finite, or so large that sums of their squares are not, are replaced.
"""

from __future__ import annotations

from typing import Any

import torch

from tenant_sdk.model.base_products import group_of
from tenant_sdk.model.remote_group import RemoteGroup
from wire.frame import Direction

_LARGEST = 1e15
"""The bound on a number of a reply. Sums of squares of such numbers are finite in float32, and no weight is near it."""


@torch.no_grad()
def public_group_products(group: RemoteGroup, rows: torch.Tensor) -> list[torch.Tensor]:
    """Returns rows·W for each layer of a group, without biases; the rows are public.

    Args:
        group: the group.
        rows: shape (num_rows, in_features).

    Returns:
        For each layer, in the order of the manifest: float32, shape (num_rows, out_features of the layer).
    """
    parts = list(group.run_public(Direction.FORWARD, rows).split(group.member_features, dim=1))
    biases = group.base_biases if group.provider_adds_bias else [None] * len(parts)
    return [_bounded(part if bias is None else part - bias) for part, bias in zip(parts, biases, strict=True)]


def public_product(layer: Any, rows: torch.Tensor) -> torch.Tensor:
    """Returns rows·W for one layer, without the bias; the rows are public.

    Args:
        layer: the remote layer whose weight is W.
        rows: shape (num_rows, in_features).
    """
    return public_group_products(group_of(layer), rows)[int(layer.index)]


@torch.no_grad()
def public_transposed_product(layer: Any, rows: torch.Tensor) -> torch.Tensor:
    """Returns rows·Wᵀ for one layer; the rows are public.

    Args:
        layer: the remote layer whose weight is W.
        rows: shape (num_rows, out_features).
    """
    group = group_of(layer)
    parts = [rows.new_zeros(rows.shape[0], features) for features in group.member_features]
    parts[layer.index] = rows.detach()
    return _bounded(group.run_public(Direction.BACKWARD, torch.cat(parts, dim=1)))


def public_numbers(layer: Any) -> torch.Generator:
    """Returns a generator of numbers that anyone can make again: they depend on the layer's place in the model only."""
    group = group_of(layer)
    return torch.Generator().manual_seed(group.spec.id * len(group.member_features) + int(layer.index))


def _bounded(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.nan_to_num(0.0, 0.0, 0.0).clamp(-_LARGEST, _LARGEST)
