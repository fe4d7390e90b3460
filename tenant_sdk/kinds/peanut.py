"""This module implements PEANuT over remote layers. PEANuT adds a matrix to the base weight W, of shape (out_features,
in_features): the output of small networks whose input is A·W, with a trained matrix A of r rows.

A·W takes r rows in the backward direction in each forward pass of training, and once for an answer. Its gradient takes
r rows in the forward direction in each backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.peanut.layer import Linear as PeanutLinear
from peft.tuners.peanut.model import PeanutModel
from transformers.activations import ACT2FN

from tenant_sdk.kinds.products import KnownProduct, is_remote


class RemotePeanut(PeanutLinear):  # type: ignore[misc]
    """Implements PEANuT's layer without reading the base weight."""

    def update_layer(self, adapter_name: str, r: int, config: Any) -> None:
        """Creates the adapter's parameters, as PEFT's layer does."""
        self._products: dict[str, KnownProduct] = {**getattr(self, "_products", {}), adapter_name: KnownProduct()}
        super().update_layer(adapter_name, r, config)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Returns the layer's output, as PEFT's layer does."""
        result: torch.Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return result
        for name in self.active_adapters:
            if name in self.peanut_A:
                features = self._features(name)
                inner = self._cast_input_dtype(x, features.dtype) @ features
                result = result + (self.peanut_B[name](inner) * self.scaling[name]).to(result.dtype)
        return result

    def _features(self, name: str) -> torch.Tensor:
        """Returns the output of the networks for (A·W)ᵀ, shape (in_features, r)."""
        act = ACT2FN[self.act_fn[name]]
        product = self._products[name].of(self.get_base_layer(), self.peanut_A[name].weight)
        features = act(product.T)
        residuals = []
        for encoder in self.peanut_encoders[name]:
            residuals.append(features)
            features = act(encoder(features))
        for decoder in self.peanut_decoders[name]:
            features = act(decoder(features)) + residuals.pop()
        return features  # type: ignore[no-any-return]


class RemotePeanutModel(PeanutModel):  # type: ignore[misc]
    """Creates PEANuT's layers: `RemotePeanut` over a remote linear layer; PEFT's own method handles other layers."""

    @staticmethod
    def _create_new_module(peanut_config: Any, adapter_name: str, target: Any) -> Any:
        if not is_remote(target) or not isinstance(target, torch.nn.Linear):
            return PeanutModel._create_new_module(peanut_config, adapter_name, target)
        return RemotePeanut(target, adapter_name, r=peanut_config.r, config=peanut_config)
