"""This module implements HRA over remote layers. HRA multiplies the base weight, of shape (out_features, in_features),
by a product H of reflections: W' = W·H.

A layer multiplies its input x by Hᵀ, and sends the result in place of x in the call that it makes anyway. The layers of
a group then have different inputs, so they no longer share a call (docs/peft.md).
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.hra.layer import HRALinear
from peft.tuners.hra.model import HRAModel

from tenant_sdk.kinds.products import is_remote


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
