"""Makes the model that a provider really computes with: the weights of its base layers are rounded to int8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.support.parity import local
from wire.ring.quantise import quantise


def dequantised(folder: Path) -> Any:
    """Returns the local model in a folder, with each served layer's weight rounded to int8 and scaled back."""
    model: Any = local(folder)
    for layer in model.modules():
        if not isinstance(layer, nn.Linear | Conv1D) or layer.weight is model.get_input_embeddings().weight:
            continue
        is_conv = isinstance(layer, Conv1D)
        quantised, alpha = quantise(layer.weight if is_conv else layer.weight.t())
        weight = quantised * alpha
        with torch.no_grad():
            layer.weight.copy_(weight if is_conv else weight.t())
    return model
