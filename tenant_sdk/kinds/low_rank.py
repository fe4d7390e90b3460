"""This module implements four kinds of adapters over remote layers, TinyLoRA, DEFT, DeLoRA and PEANuT: their layers do
not read the base weight W, of shape (out_features, in_features), and get what they need of it from products.

TinyLoRA trains a few numbers between two fixed factors of W, which come from its leading singular vectors. The factors
are found by products once, when an adapter is made, and are stored in its file. PEFT takes the exact singular vectors;
here the subspace holds nearly as much of the weight (tenant_sdk/kinds/products.py).

DEFT's weight is (I - P·Qᵀ)·W + P·R. PEFT computes P and Q from one trained matrix of r columns; R is trained, too. The
layers use the output of the call that they make anyway. Only R's initial value, Qᵀ·W, needs a product: r rows in the
backward direction, once when an adapter is made. R is published with the file, so these rows are public
(tenant_sdk/kinds/products.py): P and Q start from numbers that anyone can make again, not from the run's seed. An
adapter that is loaded has R in its file.

DeLoRA scales each input feature by a norm: that of the weights by which the base layer multiplies the feature. The
norms are stored in an adapter's file. When an adapter is made, they are computed once, from unit rows, which are
public: the product of a unit row and W consists of the weights of one input feature, of which only the norm is kept.
The layers themselves use the output of the call that they make anyway.

PEANuT adds a matrix to W: the output of small networks whose input is A·W, with a trained matrix A of r rows. A·W takes
r rows in the backward direction in each forward pass of training, and once for an answer. Its gradient takes r rows in
the forward direction in each backward pass.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from peft.tuners.deft.layer import DeftLinear
from peft.tuners.deft.model import DeftModel
from peft.tuners.delora.layer import DeloraLinear
from peft.tuners.delora.model import DeloraModel
from peft.tuners.peanut.layer import Linear as PeanutLinear
from peft.tuners.peanut.model import PeanutModel
from peft.tuners.tinylora.layer import Linear as TinyLoraLinear
from peft.tuners.tinylora.model import TinyLoraModel
from torch import nn
from transformers.activations import ACT2FN

from tenant_sdk.kinds.products import (
    ITERATIONS,
    KnownProduct,
    is_remote,
    layer_shape,
    leading_factors,
    public_group_products,
    public_numbers,
    public_transposed_product,
)
from tenant_sdk.model.base_products import group_of
from tenant_sdk.model.remote_group import RemoteGroup


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


class RemoteDeft(DeftLinear):  # type: ignore[misc]
    """Implements DEFT's layer without reading the base weight."""

    def update_layer(self, adapter_name: str, r: int, config: Any, **kwargs: Any) -> None:
        """Creates the adapter's parameters, as PEFT's layer does."""
        self._is_loaded = config.inference_mode
        super().update_layer(adapter_name, r, config, **kwargs)

    def reset_deft_parameters(self, adapter_name: str, init_weights: bool = True) -> None:
        """Sets the adapter's initial values, as PEFT's layer does. An adapter that is being loaded gets NaN in R, which
        its file replaces."""
        if not init_weights or self.deft_para[adapter_name]:
            return super().reset_deft_parameters(adapter_name, init_weights)  # type: ignore[no-any-return]
        projection, injection = self.deft_P[adapter_name], self.deft_R[adapter_name]
        with torch.no_grad():
            if self._is_loaded:
                nn.init.normal_(projection, mean=0.0, std=0.02)
                injection.fill_(math.nan)
                return None
            layer = self.get_base_layer()
            projection.normal_(std=0.02, generator=public_numbers(layer))
            _, right = self._project(projection, adapter_name)
            start = public_transposed_product(layer, right.T)
            injection.copy_(start / self.deft_scaling[adapter_name])
        return None


class RemoteDeftModel(DeftModel):  # type: ignore[misc]
    """Creates DEFT's layers: `RemoteDeft` over a remote layer; PEFT's own method handles other layers."""

    @staticmethod
    def _create_new_module(deft_config: Any, adapter_name: str, target: Any, **kwargs: Any) -> Any:
        if not is_remote(target):
            return DeftModel._create_new_module(deft_config, adapter_name, target, **kwargs)
        deft_config.fan_in_fan_out = not isinstance(target, nn.Linear)
        return RemoteDeft(target, adapter_name, config=deft_config, **kwargs)


_ROWS = 256
"""The most unit rows of a call, which bounds the memory that replies take on wide layers."""
_KNOWN: weakref.WeakKeyDictionary[RemoteGroup, list[torch.Tensor]] = weakref.WeakKeyDictionary()
"""The norms of all layers of each group, so that one set of calls serves all layers of a group."""


class RemoteDelora(DeloraLinear):  # type: ignore[misc]
    """Implements DeLoRA's layer without reading the base weight."""

    def update_layer(self, adapter_name: str, r: int, delora_lambda: float, config: Any, **kwargs: Any) -> None:
        """Creates the adapter's parameters, as PEFT's layer does."""
        self._is_loaded = config.inference_mode
        super().update_layer(adapter_name, r, delora_lambda, config, **kwargs)

    def reset_delora_parameters(
        self, adapter_name: str, init_weights: bool = True, delora_lambda: float = 15.0
    ) -> None:  # fmt: skip
        """Sets the adapter's initial values, as PEFT's layer does. An adapter that is being loaded gets NaN as norms,
        which its file replaces."""
        nn.init.kaiming_uniform_(self.delora_A[adapter_name], a=math.sqrt(5))
        if init_weights is True:
            nn.init.zeros_(self.delora_B[adapter_name])
        else:
            nn.init.kaiming_uniform_(self.delora_B[adapter_name], a=math.sqrt(5))
        self.delora_lambda[adapter_name].data.fill_(float(delora_lambda))
        norms = torch.full((self.in_features,), math.nan) if self._is_loaded else row_norms(self.get_base_layer())
        self.delora_w_norm[adapter_name] = norms


class RemoteDeloraModel(DeloraModel):  # type: ignore[misc]
    """Creates DeLoRA's layers: `RemoteDelora` over a remote linear layer; PEFT's own method handles other layers."""

    @staticmethod
    def _create_new_module(delora_config: Any, adapter_name: str, target: Any, **kwargs: Any) -> Any:
        if not is_remote(target) or not isinstance(target, nn.Linear):
            return DeloraModel._create_new_module(delora_config, adapter_name, target, **kwargs)
        return RemoteDelora(target, adapter_name, config=delora_config, **kwargs)


def row_norms(layer: Any) -> torch.Tensor:
    """Returns the Euclidean norm of the weights by which a layer multiplies each input feature: float32, shape
    (in_features,).

    Args:
        layer: a remote layer.
    """
    group = group_of(layer)
    if group not in _KNOWN:
        _KNOWN[group] = _norms_of(group)
    return _KNOWN[group][int(layer.index)].clone()


def _norms_of(group: RemoteGroup) -> list[torch.Tensor]:
    inputs = group.spec.in_features
    parts: list[list[torch.Tensor]] = [[] for _ in group.member_features]
    for begin in range(0, inputs, _ROWS):
        rows = torch.eye(min(_ROWS, inputs - begin), inputs).roll(begin, dims=1)
        for part, product in zip(parts, public_group_products(group, rows), strict=True):
            part.append(product.norm(dim=1))
    return [torch.cat(part) for part in parts]


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
