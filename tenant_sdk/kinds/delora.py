"""This module implements DeLoRA over remote layers. A DeLoRA adapter scales each input feature by a norm: that of the
weights by which the base layer multiplies the feature.

The norms are stored in an adapter's file. When an adapter is made, they are computed once, from unit rows: the product
of a unit row and the base weight consists of the weights of one input feature, of which only the norm is kept. Unit
rows are public (tenant_sdk/kinds/public_products.py). The layers themselves use the output of the call that they make
anyway.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from peft.tuners.delora.layer import DeloraLinear
from peft.tuners.delora.model import DeloraModel
from torch import nn

from tenant_sdk.kinds.products import is_remote
from tenant_sdk.kinds.public_products import public_group_products
from tenant_sdk.model.base_products import group_of
from tenant_sdk.model.remote_group import RemoteGroup

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
