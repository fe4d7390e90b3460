"""This module implements two kinds of PEFT adapters, HRA and PSOFT, over remote layers, without reading base weights.

HRA multiplies the base weight, of shape (out_features, in_features), by a product H of reflections: W' = W·H. A layer
multiplies its input x by Hᵀ, and sends the result in place of x in the call that it makes anyway. The layers of a group
then have different inputs, so they no longer share a call (docs/peft.md).

PSOFT turns the leading singular vectors of the base weight by a trained matrix R: it replaces their part B·A of the
weight by B·R·A. The singular vectors are found by products once, when an adapter is made. PEFT does not store them: it
takes them from the weight again when it loads a file, and would not find the same ones. So an adapter is saved as plain
LoRA of the same rank, A and B·(R - I), which loads on the plain base model. R cannot be read from that file, so a run
cannot be resumed.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PsoftConfig
from peft.tuners.hra.layer import HRALinear
from peft.tuners.hra.model import HRAModel
from peft.tuners.psoft.layer import Linear as PsoftLinear
from peft.tuners.psoft.model import PsoftModel

from tenant_sdk.kinds.products import SavedSettings, check_rank, is_remote, leading_factors
from wire.errors import ConfigurationError


class RemoteHra(HRALinear):  # type: ignore[misc]
    """Implements HRA's layer without reading the base weight."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the layer's output, as PEFT's layer does."""
        active = [name for name in self.active_adapters if name in self.hra_u]
        if self.disable_adapters or not active:
            return self.base_layer(x, *args, **kwargs)  # type: ignore[no-any-return]
        turned = x.to(self.hra_u[active[0]].dtype)
        for name in reversed(active):  # W·H₁·H₂ of two adapters turns by H₂ first
            turned = turned @ self.get_delta_weight(name).T
        return self.base_layer(turned, *args, **kwargs).to(x.dtype)  # type: ignore[no-any-return]


class RemoteHraModel(HRAModel):  # type: ignore[misc]
    """Creates HRA's layers: `RemoteHra` over a remote linear layer; PEFT's own method handles other layers."""

    @staticmethod
    def _create_new_module(hra_config: Any, adapter_name: str, target: Any, **kwargs: Any) -> Any:
        if not is_remote(target) or not isinstance(target, torch.nn.Linear):
            return HRAModel._create_new_module(hra_config, adapter_name, target, **kwargs)
        return RemoteHra(target, adapter_name, config=hra_config, **kwargs)


class RemotePsoft(PsoftLinear):  # type: ignore[misc]
    """Implements PSOFT's layer without reading the base weight."""

    def _build_psoft_ab_cache_buffers(self, adapter_name: str, init_type: str) -> None:
        """Finds the factors A and B of the leading part of the base weight.

        Raises:
            ConfigurationError: the rank is larger than the number of the weight's singular values.
        """
        layer, rank = self.get_base_layer(), self.r[adapter_name]
        check_rank(layer, rank)
        left, values, right = leading_factors(layer, rank, self.psoft_svd_lowrank_niter[adapter_name])
        values = values / self.scaling[adapter_name]
        if init_type == "psoft_init":
            inner, outer = right, left * values
        else:
            inner, outer = values.sqrt().unsqueeze(1) * right, left * values.sqrt()
        self._set_psoft_ab_cache_buffers(adapter_name, inner.contiguous(), outer.contiguous())

    def as_lora(self, adapter_name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns A and B of plain LoRA with the same effect and the same scaling."""
        inner, outer = self._get_psoft_ab_cache_buffers(adapter_name)
        turn = self._get_R_matrix(adapter_name).detach().to(inner)
        return inner, outer @ (turn - torch.eye(turn.shape[0], dtype=turn.dtype, device=turn.device))


class PsoftSavedAsLora(SavedSettings, PsoftConfig):  # type: ignore[misc]
    """Holds PSOFT's settings, and gives PEFT those of plain LoRA to save, since the adapter is saved as plain LoRA."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings of plain LoRA with the same rank and scaling."""
        same = ("task_type", "base_model_name_or_path", "revision", "inference_mode", "target_modules", "peft_version")
        settings = LoraConfig(
            r=self.r, lora_alpha=self.psoft_alpha, exclude_modules=self.exclude_modules,
            layers_to_transform=self.layers_to_transform, layers_pattern=self.layers_pattern,
            modules_to_save=self.modules_to_save,
        ).to_dict()  # fmt: skip
        return {**settings, **{name: getattr(self, name) for name in same if hasattr(self, name)}}


class RemotePsoftModel(PsoftModel):  # type: ignore[misc]
    """Creates PSOFT's layers: `RemotePsoft` over a remote linear layer; PEFT's own method handles other layers."""

    def inject_adapter(self, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Puts an adapter on the model, as PEFT does. If the model has remote layers with PSOFT, the saved settings are
        those of plain LoRA."""
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        if _layers(self.model):
            self.peft_config[adapter_name] = PsoftSavedAsLora.of(self.peft_config[adapter_name])

    @staticmethod
    def _create_new_module(psoft_config: Any, adapter_name: str, target: Any, **kwargs: Any) -> Any:
        if not is_remote(target) or not isinstance(target, torch.nn.Linear):
            return PsoftModel._create_new_module(psoft_config, adapter_name, target, **kwargs)
        if psoft_config.psoft_svd != "lowrank" or psoft_config.inference_mode:
            raise ConfigurationError(
                "PSOFT over a provider's layers is trained with psoft_svd='lowrank' and saved as LoRA"
            )
        psoft_config.fan_in_fan_out = False
        return RemotePsoft(target, adapter_name, config=psoft_config, **kwargs)

    @classmethod
    def _get_adapter_state_dict(
        cls, model: Any, config: Any, adapter_name: str, state_dict: Any, unwanted_adapter_names: Any
    ) -> dict[str, torch.Tensor]:
        """Returns an adapter's tensors as they are saved, those of LoRA."""
        layers = _layers(model)
        held = super()._get_adapter_state_dict(model, config, adapter_name, state_dict, unwanted_adapter_names)
        saved: dict[str, torch.Tensor] = {
            key: each for key, each in held.items() if key.partition(".psoft_R.")[0] not in layers
        }
        for name, layer in layers.items():
            inner, outer = layer.as_lora(adapter_name)
            saved[f"{name}.lora_A.{adapter_name}.weight"] = inner
            saved[f"{name}.lora_B.{adapter_name}.weight"] = outer
        return saved

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: Any, config: Any, adapter_name: str, state_dict: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns a file's tensors by the model's own names.

        Raises:
            ConfigurationError: the layers are remote, so that the file lacks R.
        """
        if _layers(model):
            raise ConfigurationError("a PSOFT run cannot be resumed: pass resume=False (--no-resume) to start over")
        loaded: dict[str, torch.Tensor] = super()._remap_adapter_state_dict_for_load(
            model, config, adapter_name, state_dict
        )
        return loaded


def _layers(model: Any) -> dict[str, RemotePsoft]:
    return {name: module for name, module in model.named_modules() if isinstance(module, RemotePsoft)}
