"""This module multiplies a tenant's own rows by base weights, for adapters that need such products besides the model's
own calls.

The weights stay with the provider. The rows go through the same masked calls as a model's activations or gradients.

Guarantees: every call masks its rows with fresh slots (unused rows of the mask), and its reply is checked with
`verify`. A call neither uses nor replaces the outputs that the layers of a group share
(tenant_sdk/model/remote_group.py). No gradient is recorded. The provider sees how many rows a call has, so callers must
choose this number without looking at contents.
"""

from __future__ import annotations

import torch

from tenant_sdk.model.remote_group import RemoteGroup
from tenant_sdk.model.remote_linear import NOT_ATTACHED, RemoteConv1D, RemoteLinear
from wire.errors import ConfigurationError
from wire.frame import Direction

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
def group_products(group: RemoteGroup, rows: torch.Tensor) -> list[torch.Tensor]:
    """Returns rows·W for each layer of a group, without biases. One call computes all of them.

    Args:
        group: the group.
        rows: shape (num_rows, in_features), any float dtype and device.

    Returns:
        For each layer, in the order of the manifest: float32, shape (num_rows, out_features of the layer).
    """
    product = group.run(Direction.FORWARD, rows.detach())
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
    return group_products(group_of(layer), rows)[layer.index]


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
    return group.run(Direction.BACKWARD, torch.cat(parts, dim=1))
