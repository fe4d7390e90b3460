"""This module turns a DoRA adapter's magnitudes into gains, the factors by which DoRA multiplies a layer's outputs.

The gain of output j is the adapter's magnitude divided by the norm of column j of W + s·AᵀBᵀ. An adapter that is served
does not change, so its gains are computed once, when it is brought into host memory.

Guarantees: for layers at the provider, the calls depend on which layers the adapter has and on its ranks, and on
nothing else. They mask their rows with fresh slots. Gains are finite and bounded, whatever the provider answers.
"""

from __future__ import annotations

import contextlib
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
        ConfigurationError: a magnitude is no number, or much larger than its norm.
        VeilbaseError: a call to the provider failed.
    """
    pieces = packed.values.split([layer.num_weights for layer in packed.layers])
    factors: _Factors = {
        layer.module: (layer, *layer.factors(piece)) for layer, piece in zip(packed.layers, pieces, strict=True)
    }
    norms = _local_norms(factors, layers) | _remote_norms(factors, layers)
    gains = {module: magnitudes[module].to(torch.float32) / norms[module].cpu() for module in factors}
    for module, gain in gains.items():
        if not bool((gain.abs() <= MAX_GAIN).all()):  # NaN is not
            raise ConfigurationError(
                f"the adapter {name} (DoRA) has magnitudes of {module} that are no numbers, or more than {MAX_GAIN:g} "
                "times the norms of the weights"
            )
    return gains


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
    by_group: dict[RemoteGroup, list[str]] = {}
    for module in factors:
        like = layers[module].like
        if isinstance(like, RemoteLinear | RemoteConv1D):
            like.column_norms()  # refuses false norms before anything is sent
            by_group.setdefault(group_of(like), []).append(module)
    norms = {}
    with contextlib.ExitStack() as stack:
        for group in sorted(by_group, key=lambda each: each.spec.id):
            if not norms:  # the groups of a model have the same courses
                stack.enter_context(group.planned_calls.own_course(may_stop=True))
            norms |= _group_norms(group, by_group[group], factors, layers)
    return norms


def _group_norms(
    group: RemoteGroup, modules: list[str], factors: _Factors, layers: Mapping[str, Layer]
) -> dict[str, torch.Tensor]:  # fmt: skip
    likes: dict[str, Any] = {module: layers[module].like for module in modules}
    ordered = sorted(modules, key=lambda module: int(likes[module].index))
    rows = torch.cat([factors[module][1].to(torch.float32) for module in ordered])
    products = group_products(group, rows.to(likes[ordered[0]].weight.device))
    group.planned_calls.course.check(products)
    norms, begin = {}, 0
    for module in ordered:
        layer, lora_a, lora_b = factors[module]
        cross = products[likes[module].index][begin : begin + layer.rank].cpu()
        begin += layer.rank
        norms[module] = column_norms_of_sum(
            likes[module].column_norms().cpu(), cross, lora_a, lora_b.t(), layer.scaling
        )
    return norms
