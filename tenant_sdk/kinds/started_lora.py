"""This module implements LoRA that starts from a low-rank part of the base weight: PiSSA by iterations, and OLoRA.

PEFT takes the part B₀·A₀ out of the weight and starts the adapter from this part. Here the weight stays as it is, and a
layer subtracts the product with B₀·A₀ itself. The part is found by products, once when an adapter is made. An adapter
of this module is called started.

Guarantees: such an adapter is saved as plain LoRA of twice the rank, [A; A₀] and [B, -B₀], as PEFT's own conversion
does, so that it loads on the plain base model. A file that is loaded into the adapter again, as when a run is resumed,
is split into the same numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from peft import LoraConfig
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.lora.layer import Linear as LoraLinear
from peft.tuners.lora.model import LoraModel
from torch.nn import functional

from tenant_sdk.kinds.products import SavedSettings, check_rank, is_remote, leading_columns, leading_factors
from wire.errors import ConfigurationError

_ITERATIONS = re.compile(r"pissa_niter_(\d{1,3})")


def _starts_from_the_weight(config: Any) -> bool:
    """Returns whether a LoRA config asks for a start that this module makes."""
    how = getattr(config, "init_lora_weights", None)
    return isinstance(how, str) and (how.lower() == "olora" or _ITERATIONS.fullmatch(how) is not None)


class StartedLora(LoraLinear):  # type: ignore[misc]
    """Implements LoRA's layer without changing the base weight.

    Attributes:
        lora_start_A, lora_start_B: the factors A₀ and B₀ from which an adapter started, by the adapter's name.
    """

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Creates the adapter's parameters, as PEFT's layer does."""
        if not hasattr(self, "lora_start_A"):
            self.lora_start_A, self.lora_start_B = BufferDict(persistent=True), BufferDict(persistent=True)
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)

    def pissa_init(self, adapter_name: str, init_lora_weights: str) -> None:
        """Starts an adapter from leading singular vectors and values that iterations find."""
        found = _ITERATIONS.fullmatch(init_lora_weights)
        if found is None:
            raise ConfigurationError(f"expected pissa_niter_NUMBER, got {init_lora_weights}")
        check_rank(self.get_base_layer(), self.r[adapter_name])
        left, values, right = leading_factors(self.get_base_layer(), self.r[adapter_name], int(found[1]))
        root = (values / self.scaling[adapter_name]).sqrt()
        self._start(adapter_name, root.unsqueeze(1) * right, left * root)

    def olora_init(self, adapter_name: str) -> None:
        """Starts an adapter from the first columns and rows of the weight's QR decomposition."""
        check_rank(self.get_base_layer(), self.r[adapter_name])
        outer, inner = leading_columns(self.get_base_layer(), self.r[adapter_name])
        self._start(adapter_name, inner, outer)

    def _start(self, name: str, inner: torch.Tensor, outer: torch.Tensor) -> None:
        for linear, kept, start in (
            (self.lora_A[name], self.lora_start_A, inner),
            (self.lora_B[name], self.lora_start_B, outer),
        ):
            linear.weight.data = start.to(linear.weight).contiguous()
            kept[name] = linear.weight.data.clone()

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the layer's output, as PEFT's layer over the changed weight does.

        Raises:
            ConfigurationError: `adapter_names` gives each row its own adapter.
        """
        if kwargs.get("adapter_names") is not None:
            raise ConfigurationError("an adapter that starts from the base weight takes all rows of a batch")
        result: torch.Tensor = super().forward(x, *args, **kwargs)
        if self.disable_adapters:
            return result
        for name in self.active_adapters:
            if name in self.lora_start_A:
                inner, outer = self.lora_start_A[name], self.lora_start_B[name]
                start = functional.linear(functional.linear(x.to(inner.dtype), inner), outer)
                result = result - (self.scaling[name] * start).to(result.dtype)
        return result


class SavedAsLora(SavedSettings, LoraConfig):  # type: ignore[misc]
    """Holds the settings of a started adapter, and gives PEFT those of plain LoRA to save, since the adapter is saved
    as plain LoRA."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings of plain LoRA with twice the rank and the same scaling."""
        settings: dict[str, Any] = super().to_dict()
        factor = math.sqrt(2) if self.use_rslora else 2
        return {
            **settings,
            "init_lora_weights": True,
            "r": 2 * self.r,
            "lora_alpha": factor * self.lora_alpha,
            "rank_pattern": {key: 2 * rank for key, rank in (self.rank_pattern or {}).items()},
            "alpha_pattern": {key: factor * alpha for key, alpha in (self.alpha_pattern or {}).items()},
        }


class StartedLoraModel(LoraModel):  # type: ignore[misc]
    """Creates LoRA's layers: `StartedLora` over a remote layer from whose weight the adapter starts, and PEFT's own
    class in all other cases."""

    def inject_adapter(self, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Puts an adapter on the model, as PEFT does. The saved settings of a started adapter are those of plain
        LoRA."""
        super().inject_adapter(model, adapter_name, *args, **kwargs)
        if any(adapter_name in module.lora_start_A for module in _started(self.model)):
            self.peft_config[adapter_name] = SavedAsLora.of(self.peft_config[adapter_name])

    @staticmethod
    def _create_new_module(lora_config: Any, adapter_name: str, target: Any, **kwargs: Any) -> Any:
        if not (is_remote(target) and _starts_from_the_weight(lora_config)):
            return LoraModel._create_new_module(lora_config, adapter_name, target, **kwargs)
        if not isinstance(target, torch.nn.Linear) and lora_config.init_lora_weights.lower() == "olora":
            raise ConfigurationError("PEFT's OLoRA does not take Conv1D layers: use init_lora_weights='pissa_niter_8'")
        lora_config.fan_in_fan_out = not isinstance(target, torch.nn.Linear)
        kwargs["is_target_conv_1d_layer"] = lora_config.fan_in_fan_out
        return StartedLora(target, adapter_name, config=lora_config, **kwargs)

    @classmethod
    def _get_adapter_state_dict(
        cls, model: Any, config: Any, adapter_name: str, state_dict: Any, unwanted_adapter_names: Any
    ) -> dict[str, torch.Tensor]:
        """Returns an adapter's tensors as they are saved: those of a started layer with twice the rank."""
        held = super()._get_adapter_state_dict(model, config, adapter_name, state_dict, unwanted_adapter_names)
        saved: dict[str, torch.Tensor] = {key: each for key, each in held.items() if ".lora_start_" not in key}
        for key, start in held.items():
            if ".lora_start_A." in key:
                own = key.replace(".lora_start_A.", ".lora_A.") + ".weight"
                saved[own] = torch.cat([saved[own], start], dim=0)
            elif ".lora_start_B." in key:
                own = key.replace(".lora_start_B.", ".lora_B.") + ".weight"
                saved[own] = torch.cat([saved[own], -start], dim=1)
        return saved

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: Any, config: Any, adapter_name: str, state_dict: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns a file's tensors by the model's own names. Those of a started layer are split into A, A₀, B and
        B₀.

        Raises:
            ConfigurationError: the model is over a provider's layers, and a tensor has no place in it. PEFT would leave
                this tensor out, and answer as if the file did not hold it.
        """
        split, modules = dict(state_dict), dict(model.named_modules())
        for key, saved in state_dict.items():
            module, _, last = key.removesuffix(".weight").rpartition(".")
            if last not in ("lora_A", "lora_B") or not _is_started(modules, module, adapter_name):
                continue
            if last == "lora_A":
                split[key], split[f"{module}.lora_start_A"] = saved.chunk(2, dim=0)
            else:
                split[key], negative = saved.chunk(2, dim=1)
                split[f"{module}.lora_start_B"] = -negative
        loaded: dict[str, torch.Tensor] = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, split)
        if any(is_remote(module) for module in modules.values()):
            has_place = model.state_dict().keys()
            unused = next((key for key in loaded if key not in has_place), None)
            if unused is not None:
                raise ConfigurationError(
                    f"the adapter holds {ascii(unused)[:120]}, which PEFT does not use: save the adapter of this model "
                    "alone, by save_pretrained(..., save_embedding_layers=False)"
                )
        return loaded

    @classmethod
    def _convert_state_dict_for_initial_model(cls, *_: Any, **__: Any) -> NoReturn:
        """Raises ConfigurationError: PEFT's conversion to plain LoRA is not needed, since the file is plain LoRA."""
        raise ConfigurationError(
            "save without path_initial_model_for_weight_conversion: the file is plain LoRA already"
        )


def _started(model: Any) -> list[StartedLora]:
    return [module for module in model.modules() if isinstance(module, StartedLora)]


def _is_started(modules: Mapping[str, torch.nn.Module], name: str, adapter_name: str) -> bool:
    module = modules.get(name, modules.get(name.removeprefix("base_model.model.")))
    return isinstance(module, StartedLora) and adapter_name in module.lora_start_A
