"""Turns a loaded model into the weights of its groups of layers, a manifest and a client bundle.

Guarantees: each original weight is freed as soon as it is quantised, and the model itself is dropped, so that the
provider's memory holds little more than the served weights. Weights are quantised by wire/ring/quantise.py, as the
protocol prescribes.
"""

from __future__ import annotations

import ctypes
import gc
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from provider.model.bundle import Bundle, build_bundle
from provider.model.load import LoadedModel
from provider.model.served_group import ServedGroup
from provider.model.trace import base_layers, group_name, layer_kind, trace_groups
from wire.errors import ConfigurationError
from wire.frame import PROTOCOL_VERSION
from wire.limits import MAX_GROUPS, Limits
from wire.manifest import NATIVE_NORMS, GroupInfo, LayerInfo, Manifest
from wire.ring.quantise import column_norms, digest, max_norms, quantise

WeightsKind = Literal["int8", "native"]
_LOGGER = logging.getLogger(__name__)
_NOTICED_SHARE = 0.05
"""A warning is logged if at least this share of the parameters is in modules that cannot be served. Routers and mixing
coefficients stay below this share; stacked experts are most of a model."""


@dataclass(frozen=True, eq=False)
class PreparedModel:
    """Holds everything that a provider serves: the manifest, the weights and the bundle. It is read-only."""

    manifest: Manifest
    groups: tuple[ServedGroup, ...]
    bundle: Bundle

    @property
    def weight_bytes(self) -> int:
        return sum(group.weight_bytes for group in self.groups)


def serve_model(
    loaded: LoadedModel,
    weights: WeightsKind = "int8",
    patterns: str | None = None,
    limits: Limits | None = None,
    bundle_parent: Path | None = None,
    recording: bool = False,
) -> PreparedModel:
    """Prepares a loaded model for serving: groups and quantises its layers, and writes its bundle and manifest.

    Args:
        loaded: the loaded model; its attributes `model` and `tokenizer` are set to None.
        weights: `int8`, or `native` to keep the checkpoint's weights as well.
        patterns: the layers to serve; see `provider.model.trace.base_layers`.
        limits: the limits on requests that the manifest announces; None for the default limits.
        bundle_parent: the folder in which the bundle's temporary folder is made; None for the system's folder.
        recording: whether the manifest tells tenants that their traffic is recorded.

    Returns:
        The model's manifest, weights and bundle.

    Raises:
        ConfigurationError: there is no layer to serve, there are more than `MAX_GROUPS` groups, a weight cannot be
            quantised, or the disk cannot be written.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    loaded.model = loaded.tokenizer = None
    _warn_of_other_weights(model)
    layers = base_layers(model, patterns)
    names = trace_groups(model, layers)
    if len(names) > MAX_GROUPS:
        raise ConfigurationError(f"expected at most {MAX_GROUPS} groups, the model has {len(names)}")
    groups = tuple(
        _serve_group(index, {name: layers[name] for name in members}, weights) for index, members in enumerate(names)
    )
    bundle, config = build_bundle(model, tokenizer, _scales(groups), _norms(groups), bundle_parent)
    manifest = Manifest(
        protocol=PROTOCOL_VERSION,
        model_id=loaded.model_id,
        config=config,
        weights=weights,
        arithmetic=("ring", "float"),
        groups=tuple(group.info for group in groups),
        bundle=bundle.files,
        bundle_digest=bundle.digest,
        limits=limits or Limits(),
        recording=recording,
    )
    del model, layers
    return_freed_memory()
    return PreparedModel(manifest, groups, bundle)


def other_weights_share(model: nn.Module) -> float:
    """Returns the share of a model's parameters that are in matrices of modules other than nn.Linear, Conv1D,
    convolutions and embeddings; such matrices cannot be served.

    Stacked experts are an example: a single parameter of shape (num_experts, in_features, out_features).
    """
    from transformers.pytorch_utils import Conv1D

    known = (nn.Linear, Conv1D, nn.Embedding, nn.modules.conv._ConvNd)
    sizes = {id(parameter): parameter.numel() for parameter in model.parameters()}
    others = [module for module in model.modules() if not isinstance(module, known)]
    matrices = {id(p) for module in others for p in module.parameters(recurse=False) if p.squeeze().dim() > 1}
    return sum(sizes[place] for place in matrices) / max(1, sum(sizes.values()))


def _warn_of_other_weights(model: nn.Module) -> None:
    share = other_weights_share(model)
    if share >= _NOTICED_SHARE:
        _LOGGER.warning(
            "%.0f%% of the parameters, such as stacked experts, are in no nn.Linear or Conv1D: "
            "the tenant downloads and computes them",
            100 * share,
        )


def return_freed_memory() -> None:
    """Returns freed memory to the system. When SmolLM2-135M had been prepared, 540 MB were free, of which glibc kept
    400 MB without this call."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # Other libraries than glibc may lack it.
    if trim is not None:
        trim(0)


def _serve_group(group_id: int, layers: dict[str, nn.Module], weights: WeightsKind) -> ServedGroup:
    shapes = [_shape(module) for module in layers.values()]
    d, m = shapes[0][0], sum(out for _, out in shapes)
    quantised, alpha = torch.empty(d, m, dtype=torch.int8), torch.empty(m)
    native = torch.empty(d, m, dtype=_common_dtype(layers)) if weights == "native" else None
    bias = torch.zeros(m) if any(module.bias is not None for module in layers.values()) else None
    infos, start = [], 0
    for (name, module), (_, out) in zip(layers.items(), shapes, strict=True):
        columns = slice(start, start + out)
        weight = _matrix(module)
        part, scale = quantise(weight)
        quantised[:, columns], alpha[columns] = part, scale
        if native is not None:
            native[:, columns] = weight
        if bias is not None and module.bias is not None:
            bias[columns] = module.bias.detach().to(torch.float32)  # type: ignore[operator]
        infos.append(_layer_info(name, module, part, scale))
        module._parameters["weight"] = None  # This frees the original weight.
        start += out
    column, row = max_norms(quantised)
    info = GroupInfo(
        id=group_id,
        name=group_name(tuple(layers)),
        layers=tuple(infos),
        in_features=d,
        out_features=m,
        max_column_norm=column,
        max_row_norm=row,
        digest=digest(quantised, alpha),
    )
    return ServedGroup(info, quantised, alpha, bias, native)


def _matrix(module: nn.Module) -> torch.Tensor:
    """Returns a layer's weight with shape (in_features, out_features); nn.Linear stores it transposed."""
    weight: torch.Tensor = module.weight.detach()  # type: ignore[operator]
    return weight.t() if layer_kind(module) == "linear" else weight


def _shape(module: nn.Module) -> tuple[int, int]:
    d, m = _matrix(module).shape
    return d, m


def _common_dtype(layers: dict[str, nn.Module]) -> torch.dtype:
    dtypes = {_matrix(module).dtype for module in layers.values()}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def _layer_info(name: str, module: nn.Module, quantised: torch.Tensor, alpha: torch.Tensor) -> LayerInfo:
    column, row = max_norms(quantised)
    return LayerInfo(
        name=name,
        kind="linear" if layer_kind(module) == "linear" else "conv1d",
        bias=module.bias is not None,
        in_features=quantised.shape[0],
        out_features=quantised.shape[1],
        max_column_norm=column,
        max_row_norm=row,
        digest=digest(quantised, alpha),
    )


def _scales(groups: tuple[ServedGroup, ...]) -> dict[str, torch.Tensor]:
    scales: dict[str, torch.Tensor] = {}
    for group in groups:
        scales.update(_by_layer(group, group.alpha))
    return scales


def _norms(groups: tuple[ServedGroup, ...]) -> dict[str, torch.Tensor]:
    """Returns the contents of column_norms.safetensors (wire/SPEC.md, section 2)."""
    norms: dict[str, torch.Tensor] = {}
    for group in groups:
        norms.update(_by_layer(group, column_norms(group.quantised, group.alpha)))
        if group.native is not None:
            norms.update(_by_layer(group, column_norms(group.native), NATIVE_NORMS))
    return norms


def _by_layer(group: ServedGroup, values: torch.Tensor, prefix: str = "") -> dict[str, torch.Tensor]:
    """Returns a copy of each layer's part of a tensor that has a value for each column of a group."""
    parts = values.split([layer.out_features for layer in group.info.layers])
    return {prefix + layer.name: part.clone() for layer, part in zip(group.info.layers, parts, strict=True)}
