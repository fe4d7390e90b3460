"""This module implements Super-Tuning over remote layers, for adapters that are loaded from a file.

Super-Tuning trains the largest elements of the base weight. Only the weight itself shows which elements these are, so
an adapter cannot be trained here. The file of a trained adapter lists them (`save_precomputed_indices`, which is PEFT's
default). A layer adds the product of the input and the trained changes to the output of the call that it makes anyway.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from peft.tuners.supertuning.layer import Linear as SupertuningLinear
from peft.tuners.supertuning.model import SupertuningModel
from torch import nn

from tenant_sdk.kinds.products import added, is_remote
from tenant_sdk.kinds.refused import refusal
from wire.errors import ConfigurationError


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
