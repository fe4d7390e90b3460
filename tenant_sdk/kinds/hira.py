"""This module implements HiRA over remote layers. HiRA adds W ∘ (B·A) to the base weight W, where ∘ multiplies element
by element and B·A has rank r.

The product with W ∘ (B·A) takes r rows for each row of the input, in a call of its own (tenant_sdk/kinds/products.py).
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.hira.layer import Linear as HiraLinear
from peft.tuners.hira.model import HiraModel

from tenant_sdk.kinds.products import hadamard_product, is_remote


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
