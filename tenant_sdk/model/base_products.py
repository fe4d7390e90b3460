"""This module multiplies a tenant's own rows by base weights, for adapters that need such products besides the model's
own calls.

The weights stay with the provider. The rows go through the same masked calls as a model's activations or gradients.

Guarantees: every call masks its rows as the model's own calls do, and with `verify` its reply is checked. A call
neither uses nor replaces the outputs that the layers of a group share (tenant_sdk/model/remote_group.py). No gradient
is recorded. The provider sees how many rows a call has, so callers must choose this number without looking at contents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tenant_sdk.model.remote_group import RemoteGroup
from tenant_sdk.model.remote_linear import NOT_ATTACHED, RemoteConv1D, RemoteLinear
from wire.errors import ConfigurationError
from wire.frame import ITEM_BYTES, Direction
from wire.limits import MIB

MOST_BYTES = 32 * MIB
"""The most bytes of requests and replies that `group_products` has in flight: enough for a provider that is far away,
and transferred within the deadline of a single request on a line of 10 Mbit/s."""
RemoteLayer = RemoteLinear | RemoteConv1D


def group_of(layer: RemoteLayer) -> RemoteGroup:
    """Returns the group whose call computes a layer's output.

    Raises:
        ConfigurationError: the layer does not belong to a model of `TenantClient.load_model`.
    """
    if layer.group is None:
        raise ConfigurationError(NOT_ATTACHED)
    return layer.group


@torch.no_grad()
def group_products(calls: Sequence[tuple[RemoteGroup, torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Returns rows·W for each layer of several groups, without biases. A group takes one call, and several calls are in
    flight at the same time.

    Args:
        calls: groups of one model, each with its rows of shape (num_rows, in_features), num_rows ≥ 1, any float dtype
            and device.

    Returns:
        For each group, and in it for each layer in the order of the manifest: float32, shape (num_rows, out_features of
        the layer).
    """
    products: list[torch.Tensor] = []
    for batch in _batches(calls):
        with torch._C.DisableTorchFunction():  # no mode, such as one that keeps results, sees what masks multiply
            products += RemoteGroup.run_together([(group, rows.detach()) for group, rows in batch])
    return [_without_biases(group, product) for (group, _), product in zip(calls, products, strict=True)]


def _batches(
    calls: Sequence[tuple[RemoteGroup, torch.Tensor]],
) -> Iterator[list[tuple[RemoteGroup, torch.Tensor]]]:
    """Yields the calls in batches of at most `MOST_BYTES` of requests and replies, and of at least one call."""
    batch: list[tuple[RemoteGroup, torch.Tensor]] = []
    held = 0
    for group, rows in calls:
        size = rows.shape[0] * (group.spec.in_features + group.spec.out_features) * ITEM_BYTES
        if batch and held + size > MOST_BYTES:
            yield batch
            batch, held = [], 0
        batch.append((group, rows))
        held += size
    if batch:
        yield batch


def _without_biases(group: RemoteGroup, product: torch.Tensor) -> list[torch.Tensor]:
    parts = list(product.split(group.member_features, dim=1))
    if group.provider_adds_bias:
        for index, bias in enumerate(group.base_biases):
            if bias is not None:
                parts[index] = parts[index] - bias.to(product)
    return parts


def product(layer: RemoteLayer, rows: torch.Tensor) -> torch.Tensor:
    """Returns rows·W for one layer, without the bias.

    Args:
        layer: the layer whose weight is W.
        rows: shape (num_rows, in_features), any float dtype and device.

    Returns:
        float32, shape (num_rows, out_features).
    """
    return group_products([(group_of(layer), rows)])[0][layer.index]


@torch.no_grad()
def transposed_product(layer: RemoteLayer, rows: torch.Tensor) -> torch.Tensor:
    """Returns rows·Wᵀ for one layer, by the call that computes gradients.

    Args:
        layer: the layer whose weight is W.
        rows: shape (num_rows, out_features), any float dtype and device.

    Returns:
        float32, shape (num_rows, in_features).
    """
    group = group_of(layer)
    parts = [rows.new_zeros(rows.shape[0], features) for features in group.member_features]
    parts[layer.index] = rows.detach()
    with torch._C.DisableTorchFunction():
        return group.run(Direction.BACKWARD, torch.cat(parts, dim=1))
