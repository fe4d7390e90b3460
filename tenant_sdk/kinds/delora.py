"""This module implements DeLoRA over remote layers. DeLoRA scales its input by the norms of the base weight's rows.

The norms are stored in an adapter's file. When an adapter is made they are computed from unit rows, once: a call for
each chunk of a group's inputs returns these rows of the weight, of which only the norms are kept. Unit rows are public
(tenant_sdk/kinds/public_products.py). The layers themselves use the output of the call that they make anyway.
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
"""The most unit rows of a call. It bounds the memory that replies take on wide layers."""
_KNOWN: weakref.WeakKeyDictionary[RemoteGroup, list[torch.Tensor]] = weakref.WeakKeyDictionary()
"""The norms of each layer of a group, so that layers that share calls are asked for together."""


class RemoteDelora(DeloraLinear):  # type: ignore[misc]
    """Implements DeLoRA's layer without reading the base weight."""

    def update_layer(self, adapter_name: str, r: int, delora_lambda: float, config: Any, **kwargs: Any) -> None:
        """Makes the adapter's numbers, as PEFT's layer does."""
        self._is_loaded = config.inference_mode
        super().update_layer(adapter_name, r, delora_lambda, config, **kwargs)

    def reset_delora_parameters(
        self, adapter_name: str, init_weights: bool = True, delora_lambda: float = 15.0
    ) -> None:  # fmt: skip
        """Gives the adapter its first numbers, as PEFT's layer does. One that is being loaded gets NaN as norms."""
        nn.init.kaiming_uniform_(self.delora_A[adapter_name], a=math.sqrt(5))
        if init_weights is True:
            nn.init.zeros_(self.delora_B[adapter_name])
        else:
            nn.init.kaiming_uniform_(self.delora_B[adapter_name], a=math.sqrt(5))
        self.delora_lambda[adapter_name].data.fill_(float(delora_lambda))
        norms = torch.full((self.in_features,), math.nan) if self._is_loaded else row_norms(self.get_base_layer())
        self.delora_w_norm[adapter_name] = norms


class RemoteDeloraModel(DeloraModel):  # type: ignore[misc]
    """Makes DeLoRA's layers, those over remote layers by `RemoteDelora`."""

    @staticmethod
    def _create_new_module(delora_config: Any, adapter_name: str, target: Any, **kwargs: Any) -> Any:
        if not is_remote(target) or not isinstance(target, nn.Linear):
            return DeloraModel._create_new_module(delora_config, adapter_name, target, **kwargs)
        return RemoteDelora(target, adapter_name, config=delora_config, **kwargs)


def row_norms(layer: Any) -> torch.Tensor:
    """Returns the norm of what each input of a layer is multiplied by: float32, shape (in_features,).

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
