"""This module finds the layers of a model that adapters may change, and the shapes of these layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True)
class Base:
    """Describes the model that an adapter must fit.

    Attributes:
        names: the names by which adapters may refer to the model; the first is the model's own name.
        shapes: (inputs, outputs) of each linear layer, by module name; adapters may change these layers and no others.
        in_groups: the layers that share a call to the provider with other layers, such as q, k and v.
    """

    names: tuple[str, ...]
    shapes: Mapping[str, tuple[int, int]]
    in_groups: frozenset[str] = frozenset()


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns a model's linear layers (Linear and Conv1D, local or remote) by module name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}


def head_of(model: Any) -> str | None:
    """Returns the module name of the output head, the layer that computes logits; None if the model has none."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return next((name for name, module in model.named_modules() if module is head), None)


def shape_of(layer: Any) -> tuple[int, int]:
    """Returns (inputs, outputs) of a Linear or Conv1D without reading its weight."""
    return (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.in_features, layer.out_features)


def base_of(model: nn.Module, also: tuple[str, ...] = ()) -> Base:
    """Returns the description of a model that is needed to check whether adapters fit the model.

    Args:
        model: a transformers model.
        also: further names of the same weights, such as a hub id if the provider serves a local folder.
    """
    own, layers = str(getattr(model, "name_or_path", "") or ""), linear_layers(model)
    in_groups = frozenset(name for name, layer in layers.items() if getattr(layer, "shares_calls", False))
    return Base((own, *also), {name: shape_of(layer) for name, layer in layers.items()}, in_groups)
