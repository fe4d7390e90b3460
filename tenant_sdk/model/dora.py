"""This module makes PEFT's DoRA work over layers whose weights are at the provider.

PEFT's own DoRA layers read the whole base weight in each forward pass. The layers of this module compute the same from
the layer's output and from norms (tenant_sdk/model/dora_norms.py).

Guarantees: outputs, gradients and saved files are those of PEFT's DoRA, up to rounding. As in PEFT, the norm is no part
of the gradient. A forward pass makes the calls that LoRA makes, and two kinds of further calls: those for the norms if
A is new or has changed, and with dropout a second call for each layer, since DoRA multiplies the dropped-out input by
the base weight, too. Not guaranteed: merging, which needs the weight.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from peft import LoraConfig, PeftConfig
from peft.tuners.lora import Linear
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.variants import DoraLinearVariant
from torch import nn

from tenant_sdk.model.base_products import RemoteLayer, group_of
from tenant_sdk.model.dora_norms import NormCache, watch
from tenant_sdk.model.remote_linear import RemoteConv1D, RemoteLinear

_B_IS_ZERO = (True, "gaussian")
"""The values of `init_lora_weights` with which B is zero at first, so that W + s·BA has the norms of W."""

_Config = TypeVar("_Config", bound=PeftConfig)


def for_remote_base(config: _Config) -> _Config:
    """Returns a config with which stock PEFT can put an adapter on a model of `TenantClient.load_model`.

    Only a LoRA config with `use_dora` needs this function: the result is a copy that names the layers of this module.
    Any other config is returned unchanged. Saved adapters have the files that stock PEFT writes. The methods `finetune`
    and `generate` of `TenantClient` call this function themselves.

    Args:
        config: the config of any PEFT method.
    """
    if not isinstance(config, LoraConfig) or not config.use_dora:
        return config
    made = copy.deepcopy(config)
    made._register_custom_module({RemoteLinear: RemoteLora, RemoteConv1D: RemoteLora})
    return made


class RemoteDora(DoraLinearVariant):  # type: ignore[misc]
    """Computes DoRA in a LoRA layer over a remote layer; PEFT calls these methods."""

    @staticmethod
    def init(module: Any, adapter_name: str, config: Any = None, **_: Any) -> None:
        """Adds the magnitudes of an adapter to a layer; at first they are the norms of W + s·BA."""
        if not module.lora_magnitude_vector:
            module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
        lora_a: torch.Tensor = module.lora_A[adapter_name].weight
        magnitude = DoraLinearLayer(fan_in_fan_out=module.fan_in_fan_out)
        module.norm_caches[adapter_name] = NormCache()
        watch(module)
        if lora_a.is_meta:
            norm = torch.empty(module.out_features, device="meta")
        elif config is not None and config.init_lora_weights in _B_IS_ZERO:
            norm = module.get_base_layer().column_norms()
        else:
            norm = module.norm_caches[adapter_name].norm(module, adapter_name)
        # float32 also in a model of bfloat16, whose rounding would be as large as what training changes at first
        magnitude.weight = nn.Parameter(norm.to(torch.float32, copy=True), requires_grad=True)
        module.lora_magnitude_vector[adapter_name] = magnitude

    @staticmethod
    def forward(module: Any, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **_: Any) -> torch.Tensor:
        """Returns the layer's output with the adapter.

        Args:
            module: the LoRA layer.
            active_adapter: the adapter's name.
            x: the layer's input, shape (..., in_features).
            result: the base layer's output for this input, shape (..., out_features).
        """
        dropout, scaling = module.lora_dropout[active_adapter], module.scaling[active_adapter]
        lora_a, lora_b = module.lora_A[active_adapter], module.lora_B[active_adapter]
        norm = module.norm_caches[active_adapter].norm(module, active_adapter)
        gain = module.lora_magnitude_vector[active_adapter].weight / norm  # (out_features,)
        base: RemoteLayer = module.get_base_layer()
        if module.training and not isinstance(dropout, nn.Identity):
            x = dropout(x)
            output: torch.Tensor = result + (gain - 1) * base.without_bias(x) + gain * (lora_b(lora_a(x)) * scaling)
            return output
        plain = result if base.bias is None else result - base.bias
        output = gain * (plain + lora_b(lora_a(x)) * scaling)
        return output if base.bias is None else output + base.bias


class RemoteLora(Linear):  # type: ignore[misc]
    """Replaces PEFT's LoRA layer over a remote layer, for configs of `for_remote_base`."""

    def __init__(self, target: Any, adapter_name: str, config: LoraConfig, **options: Any) -> None:
        """Takes the arguments of PEFT's own LoRA layer, and sets `config.fan_in_fan_out` to suit the base layer."""
        base = target.get_base_layer() if hasattr(target, "get_base_layer") else target
        self.norm_caches: dict[str, NormCache] = {}
        config.fan_in_fan_out = isinstance(base, RemoteConv1D)  # as PEFT does for the layers that it knows
        super().__init__(target, adapter_name, config=config, is_target_conv_1d_layer=config.fan_in_fan_out, **options)

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Returns PEFT's table of LoRA's variants, with DoRA for remote layers."""
        return {**super().lora_variants, ("use_dora",): RemoteDora}

    def delete_adapter(self, adapter_name: str) -> None:
        """Removes an adapter and its cached norms from the layer."""
        super().delete_adapter(adapter_name)
        self.norm_caches.pop(adapter_name, None)


def features_of_dora(model: nn.Module) -> tuple[int, int]:
    """Returns what DoRA adds to a training step for each of its rows, over LoRA.

    Returns:
        (the number of values that autograd keeps, the number of values that the provider answers in second calls).
    """
    kept = answered = 0
    layers: list[Any] = [module for module in model.modules() if isinstance(module, RemoteLora)]
    for layer in layers:
        for name in layer.norm_caches:
            kept += layer.out_features
            if not isinstance(layer.lora_dropout[name], nn.Identity):
                answered += group_of(layer.get_base_layer()).spec.out_features
    return kept, answered
