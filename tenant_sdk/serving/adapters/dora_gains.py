"""This module turns a DoRA adapter's magnitudes into gains, the factors by which DoRA multiplies a layer's outputs.

The gain of output j is the adapter's magnitude divided by the norm of column j of W + s·AᵀBᵀ, where W is the base
weight, shape (inputs, outputs), and s LoRA's scaling. An adapter that is served does not change, so its gains are
computed once, when it is brought into host memory.

Guarantees: for layers at the provider, the calls depend on which layers the adapter has and on its ranks, and on
nothing else. Their rows are masked as all others are, with masks that are used once. Nothing is sent for an adapter
with a magnitude that is NaN or infinite. Gains are finite and bounded, whatever the provider answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from tenant_sdk.model.base_products import group_of, group_products
from tenant_sdk.model.dora_norms import column_norms_of_sum
from tenant_sdk.model.remote_group import RemoteGroup
from tenant_sdk.model.remote_linear import RemoteConv1D, RemoteLinear
from tenant_sdk.serving.adapters.host import PackedAdapter, PackedLayer
from tenant_sdk.serving.adapters.peft_modules import Layer
from wire.errors import ConfigurationError

MAX_GAIN = 1e4
"""The largest magnitude of a gain, as of LoRA's scaling (peft_config.py). A larger one could make rows overflow."""

_Factors = dict[str, tuple[PackedLayer, torch.Tensor, torch.Tensor]]
"""The type of a table of a packed layer, A, shape (rank, inputs), and Bᵀ, shape (rank, outputs), by module."""


def gains_of(
    name: str, packed: PackedAdapter, magnitudes: Mapping[str, torch.Tensor], layers: Mapping[str, Layer]
) -> dict[str, torch.Tensor]:
    """Returns the gains of each layer of a DoRA adapter.

    Args:
        name: the adapter's name, for error messages.
        packed: the adapter's factors.
        magnitudes: its magnitudes by module, shape (outputs,).
        layers: the model's layers by name.

    Returns:
        By module: float32, shape (outputs,), on the CPU.

    Raises:
        ConfigurationError: a magnitude is NaN or infinite, or more than `MAX_GAIN` times the norm of its column.
        VeilbaseError: a call to the provider failed, or gave numbers that are not finite.
    """
    for module, magnitude in magnitudes.items():  # before anything is sent
        if not bool(torch.isfinite(magnitude).all()):
            raise _refusal(name, module)
    pieces = packed.values.split([layer.num_weights for layer in packed.layers])
    factors: _Factors = {
        layer.module: (layer, *layer.factors(piece)) for layer, piece in zip(packed.layers, pieces, strict=True)
    }
    norms = _local_norms(factors, layers) | _remote_norms(factors, layers)
    gains = {module: magnitudes[module].to(torch.float32) / norms[module].cpu() for module in factors}
    for module, gain in gains.items():
        if not bool((gain.abs() <= MAX_GAIN).all()):  # NaN is not
            raise _refusal(name, module)
    return gains


def _refusal(name: str, module: str) -> ConfigurationError:
    return ConfigurationError(
        f"the adapter {name} (DoRA) has magnitudes of {module} that are no numbers, or more than {MAX_GAIN:g} times "
        "the norms of the weights"
    )


def _local_norms(factors: _Factors, layers: Mapping[str, Layer]) -> dict[str, torch.Tensor]:
    norms = {}
    for module, (layer, lora_a, lora_b) in factors.items():
        like: Any = layers[module].like
        if not isinstance(like, RemoteLinear | RemoteConv1D):
            weight = like.weight.detach().to(torch.float32)
            weight = weight if isinstance(like, Conv1D) else weight.t()  # (inputs, outputs)
            whole = weight.cpu() + layer.scaling * lora_a.to(torch.float32).t() @ lora_b.to(torch.float32)
            norms[module] = torch.linalg.vector_norm(whole, dim=0).clamp_min(torch.finfo(torch.float32).tiny)
    return norms


def _remote_norms(factors: _Factors, layers: Mapping[str, Layer]) -> dict[str, torch.Tensor]:
    """Returns the norms of layers at the provider, which is asked for A·W by one call for each group of layers."""
    likes: dict[str, Any] = {
        module: layers[module].like
        for module in factors
        if isinstance(layers[module].like, RemoteLinear | RemoteConv1D)
    }
    if not likes:
        return {}
    norms = {module: like.column_norms().cpu() for module, like in likes.items()}  # before anything is sent
    by_group: dict[RemoteGroup, list[str]] = {}
    for module in sorted(likes, key=lambda module: (group_of(likes[module]).spec.id, int(likes[module].index))):
        by_group.setdefault(group_of(likes[module]), []).append(module)
    device = next(iter(likes.values())).weight.device
    rows = [torch.cat([factors[module][1].to(torch.float32) for module in own]) for own in by_group.values()]
    planned = next(iter(by_group)).planned_calls  # those of the model, and so of all its groups
    with planned.own_course(may_stop=True) as course:
        products = group_products([(group, each.to(device)) for group, each in zip(by_group, rows, strict=True)])
        course.check(part for parts in products for part in parts)
    for own, parts in zip(by_group.values(), products, strict=True):
        begin = 0
        for module in own:
            layer, lora_a, lora_b = factors[module]
            cross = parts[likes[module].index][begin : begin + layer.rank].cpu()
            begin += layer.rank
            norms[module] = column_norms_of_sum(norms[module], cross, lora_a, lora_b.t(), layer.scaling)
    return norms
