"""This module implements four kinds of adapters over remote layers: HiRA, GLoRA, SHiRA and Super-Tuning. They multiply
the base weight W element by element, which is written ∘, or change some of its elements.

- HiRA adds W ∘ (B·A) to W, where B·A has rank r. The product with W ∘ (B·A) takes r rows for each row of the input, in
  a call of its own (tenant_sdk/kinds/products.py).
- GLoRA's weight is W + W ∘ A + B, its bias is b + b ∘ D + E + W·C. If A has a low rank r (`config_A_B="lora"`, the
  default), the product with W ∘ A takes r rows for each row of the input, in a call of its own. If A is a vector or a
  number, the layer computes this product from the output of the call that it makes anyway. W·C takes one row in a call
  of its own. A layer without a bias b uses neither C nor D nor E.
- SHiRA adds a sparse matrix to W. PEFT adds the matrix to a copy of the weight. Here a layer adds the product of the
  input and the matrix to the output of the call that it makes anyway.
- Super-Tuning trains the largest elements of W. Only the weight itself shows which elements these are, so an adapter
  cannot be trained here, but loaded from a file. The file of a trained adapter lists the elements
  (`save_precomputed_indices`, which is PEFT's default). A layer adds the product of the input and the trained changes
  to the output of the call that it makes anyway.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from peft.tuners.glora.layer import GloraEmptyPath, GloraLinear, GloraLoraPath
from peft.tuners.glora.model import GloraModel
from peft.tuners.hira.layer import Linear as HiraLinear
from peft.tuners.hira.model import HiraModel
from peft.tuners.shira.layer import Linear as ShiraLinear
from peft.tuners.shira.model import ShiraModel
from peft.tuners.supertuning.layer import Linear as SupertuningLinear
from peft.tuners.supertuning.model import SupertuningModel
from torch import nn

from tenant_sdk.kinds.products import added, hadamard_product, is_remote
from tenant_sdk.kinds.refused import refusal
from wire.errors import ConfigurationError


class RemoteHira(HiraLinear):  # type: ignore[misc]
    """Implements HiRA's layer without reading the base weight."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the layer's output, as PEFT's layer does."""
        result: torch.Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return result
        dtype = result.dtype
        for name in self.active_adapters:
            if name in self.hira_A:
                down, up = self.hira_A[name], self.hira_B[name]
                dropped = self.hira_dropout[name](self._cast_input_dtype(x, down.dtype))
                result = result + hadamard_product(self.get_base_layer(), dropped, down, up)
        return result.to(dtype)


class RemoteHiraModel(HiraModel):  # type: ignore[misc]
    """Creates HiRA's layers: `RemoteHira` over a remote layer; PEFT's own method handles other layers."""

    @staticmethod
    def _create_new_module(hira_config: Any, adapter_name: str, target: Any, **kwargs: Any) -> Any:
        if not is_remote(target):
            return HiraModel._create_new_module(hira_config, adapter_name, target, **kwargs)
        stored_transposed = not isinstance(target, torch.nn.Linear)
        return RemoteHira(
            target, adapter_name, config=hira_config, r=kwargs["r"], fan_in_fan_out=stored_transposed,
            is_target_conv_1d_layer=stored_transposed,
        )  # fmt: skip


class RemoteGlora(GloraLinear):  # type: ignore[misc]
    """Implements GLoRA's layer without reading the base weight."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the layer's output, as PEFT's layer does.

        Raises:
            ConfigurationError: `adapter_names` gives each row its own adapter.
        """
        if kwargs.get("adapter_names") is not None:
            raise ConfigurationError("GLoRA over a provider's layers takes one adapter for all rows of a batch")
        result: torch.Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return result
        base, dtype = result, result.dtype
        for name in self.active_adapters:
            if name in self.glora_A:
                result = self._with_bias(self._with_weight(result, base, x, name), name)
        return result.to(dtype)

    def has_low_rank(self, name: str) -> bool:
        """Returns whether an adapter's A has low rank, so that its product needs a call of its own."""
        return isinstance(self.glora_A[name], GloraLoraPath)

    def _with_weight(self, result: torch.Tensor, base: torch.Tensor, x: torch.Tensor, name: str) -> torch.Tensor:
        path = self.glora_A[name]
        if self.has_low_rank(name):
            result = result + hadamard_product(self.get_base_layer(), x, path.Xu, path.Xd)
        elif not isinstance(path, GloraEmptyPath):
            product = base if self.bias is None else base - self.bias
            result = result + product * path().reshape(-1)
        if isinstance(self.glora_B[name], GloraEmptyPath):
            return result
        return added(result, x, self.glora_B[name]().expand(self.out_features, self.in_features))

    def _with_bias(self, result: torch.Tensor, name: str) -> torch.Tensor:
        if self.bias is None:
            return result
        result = result + self.bias * self.glora_D[name]() + self.glora_E[name]()
        path = self.glora_C[name]
        return result if isinstance(path, GloraEmptyPath) else result + self.base_layer.without_bias(path().T)[0]


class RemoteGloraModel(GloraModel):  # type: ignore[misc]
    """Creates GLoRA's layers: `RemoteGlora` over a remote linear layer; PEFT's own method handles other layers."""

    @staticmethod
    def _create_new_module(peft_config: Any, adapter_name: str, target: Any, **optional_kwargs: Any) -> Any:
        if not is_remote(target) or not isinstance(target, torch.nn.Linear):
            return GloraModel._create_new_module(peft_config, adapter_name, target, **optional_kwargs)
        return RemoteGlora(target, adapter_name, config=peft_config)


class RemoteShira(ShiraLinear):  # type: ignore[misc]
    """Implements SHiRA's layer without reading the base weight."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the layer's output, as PEFT's layer does."""
        result: torch.Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return result
        for name in self.active_adapters:
            if name in self.shira_weight:
                result = added(result, x, self._delta(name))
        return result

    def _delta(self, name: str) -> torch.Tensor:
        """Returns the sparse matrix as a dense one, shape (out_features, in_features)."""
        rows, columns = self.shira_indices[name].to(self.shira_weight[name].device, torch.int64)
        delta = self.shira_weight[name].new_zeros(self.out_features * self.in_features)
        values = self.shira_weight[name] * self.scaling[name]
        placed: torch.Tensor = delta.scatter_add(0, rows * self.in_features + columns, values)
        return placed.view(self.out_features, self.in_features)


class RemoteShiraModel(ShiraModel):  # type: ignore[misc]
    """Creates SHiRA's layers: `RemoteShira` over a remote linear layer; PEFT's own method handles other layers."""

    @staticmethod
    def _create_new_module(shira_config: Any, adapter_name: str, target: Any, **kwargs: Any) -> Any:
        if not is_remote(target) or not isinstance(target, torch.nn.Linear):
            return ShiraModel._create_new_module(shira_config, adapter_name, target, **kwargs)
        shira_config.fan_in_fan_out = False
        mask = shira_config.mask_fn and shira_config.mask_fn(target, shira_config.r, **kwargs)
        kwargs.pop("bias", None)
        return RemoteShira(target, mask, adapter_name, config=shira_config, r=shira_config.r, **kwargs)


class RemoteSupertuning(SupertuningLinear):  # type: ignore[misc]
    """Implements Super-Tuning's layer without reading the base weight."""

    def update_layer(self, adapter_name: str, config: Any, **kwargs: Any) -> None:
        """Allocates the parameters that an adapter's file fills.

        Raises:
            ConfigurationError: the adapter is to be trained, or its file does not list the elements.
        """
        if not config.inference_mode:
            raise ConfigurationError(refusal("SUPERTUNING"))
        if not config.save_precomputed_indices:
            raise ConfigurationError(
                "this Super-Tuning adapter does not list its elements, which only the base weight tells: save it again "
                "with save_precomputed_indices=True where the weights are"
            )
        num_values = self._num_trainable(self.in_features * self.out_features, config.sparsity)
        self.supertuning_indices[adapter_name] = torch.zeros(num_values, dtype=torch.int32)
        self.supertuning_values[adapter_name] = nn.Parameter(torch.full((num_values,), math.nan))
        self.supertuning_rank[adapter_name] = config.r or 0
        self.supertuning_lora_alpha[adapter_name] = float(config.lora_alpha) if config.r else 0.0
        if config.r:
            self.supertuning_lora_A[adapter_name] = nn.Linear(self.in_features, config.r, bias=False)
            self.supertuning_lora_B[adapter_name] = nn.Linear(config.r, self.out_features, bias=False)
            self.supertuning_lora_dropout[adapter_name] = nn.Identity()
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=True)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the layer's output, as PEFT's layer does."""
        result: torch.Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return result
        for name in self.active_adapters:
            if name in self.supertuning_values:
                result = added(result, x, self._delta(name))
        return result

    def _delta(self, name: str) -> torch.Tensor:
        """Returns the matrix that the adapter adds to the weight, shape (out_features, in_features)."""
        values, indices = self.supertuning_values[name], self.supertuning_indices[name].to(torch.int64)
        sparse = values.new_zeros(self.out_features * self.in_features).scatter_add(0, indices, values)
        delta: torch.Tensor = sparse.view(self.out_features, self.in_features)
        return delta + self._lora_delta(name, delta.dtype) if self.supertuning_rank[name] else delta


class RemoteSupertuningModel(SupertuningModel):  # type: ignore[misc]
    """Creates Super-Tuning's layers: `RemoteSupertuning` over a remote linear layer; PEFT's own method handles other
    layers."""

    @staticmethod
    def _create_new_module(supertuning_config: Any, adapter_name: str, target: Any, **kwargs: Any) -> Any:
        if not is_remote(target) or not isinstance(target, nn.Linear):
            return SupertuningModel._create_new_module(supertuning_config, adapter_name, target, **kwargs)
        return RemoteSupertuning(target, adapter_name, config=supertuning_config, **kwargs)
