"""The layers of a model that an adapter may add to, and their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True)
class Base:
    """What an adapter has to fit.

    Attributes:
        names: names under which adapters may know the model; the first is the model's own.
        shapes: (inputs, outputs) of each linear layer, by module name.
    """

    names: tuple[str, ...]
    shapes: Mapping[str, tuple[int, int]]


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns a model's linear layers by name: Linear and Conv1D, held here or at the provider."""
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}


def shape_of(layer: Any) -> tuple[int, int]:
    """Returns (inputs, outputs) of a Linear or Conv1D without reading its weight."""
    return (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.in_features, layer.out_features)


def base_of(model: nn.Module, also: tuple[str, ...] = ()) -> Base:
    """Describes a model to the code that checks adapters.

    Args:
        model: a transformers model.
        also: further names of the same weights, such as a hub id where the provider serves a folder.
    """
    own = str(getattr(model, "name_or_path", "") or "")
    return Base((own, *also), {name: shape_of(layer) for name, layer in linear_layers(model).items()})
