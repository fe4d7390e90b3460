"""This module implements TinyLoRA over remote layers. TinyLoRA trains a few numbers between two fixed factors of the
base weight, which come from its leading singular vectors.

The factors are found by products once, when an adapter is made, and are stored in its file. PEFT takes the exact
singular vectors; here the subspace holds nearly as much of the weight (tenant_sdk/kinds/subspace.py).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from peft.tuners.tinylora.layer import Linear as TinyLoraLinear
from peft.tuners.tinylora.model import TinyLoraModel

from tenant_sdk.kinds.products import is_remote, layer_shape
from tenant_sdk.kinds.subspace import ITERATIONS, leading_factors


class RemoteTinyLora(TinyLoraLinear):  # type: ignore[misc]
    """Implements TinyLoRA's layer without reading the base weight."""

    def update_layer(self, adapter_name: str, tinylora_v: Any, v_key: str, r: int, config: Any, **kwargs: Any) -> None:
        """Creates the adapter's parameters, as PEFT's layer does."""
        self._is_loaded = config.inference_mode
        super().update_layer(adapter_name, tinylora_v, v_key, r, config, **kwargs)

    def _init_svd(self, adapter_name: str, r: int, fan_in_fan_out: bool) -> None:
        """Finds the two factors of the base weight. An adapter that is being loaded gets NaN, which its file
        replaces."""
        layer = self.get_base_layer()
        in_features, out_features = layer_shape(layer)
        rank = min(r, in_features, out_features)
        left, right = torch.full((out_features, rank), math.nan), torch.full((rank, in_features), math.nan)
        if not self._is_loaded:
            left, values, right = leading_factors(layer, rank, ITERATIONS)
            left, right = left * values.sqrt(), values.sqrt().unsqueeze(1) * right
        dtype = layer.weight.dtype
        self.tinylora_A[adapter_name] = right.to(dtype).contiguous()
        self.tinylora_B[adapter_name] = left.to(dtype).contiguous()
        self.r[adapter_name] = rank


class RemoteTinyLoraModel(TinyLoraModel):  # type: ignore[misc]
    """Creates TinyLoRA's layers: `RemoteTinyLora` over a remote layer; PEFT's own method handles other layers."""

    @staticmethod
    def _create_new_module(
        tinylora_config: Any, tinylora_v: Any, v_key: str, adapter_name: str, target: Any, **kwargs: Any
    ) -> Any:
        if not is_remote(target):
            return TinyLoraModel._create_new_module(tinylora_config, tinylora_v, v_key, adapter_name, target, **kwargs)
        tinylora_config.fan_in_fan_out = not isinstance(target, torch.nn.Linear)
        kwargs["is_target_conv_1d_layer"] = tinylora_config.fan_in_fan_out
        return RemoteTinyLora(target, tinylora_v, v_key, adapter_name, tinylora_config, **kwargs)
