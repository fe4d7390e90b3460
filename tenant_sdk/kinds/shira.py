"""This module implements SHiRA over remote layers. SHiRA adds a sparse matrix to the base weight.

PEFT adds the matrix to a copy of the weight. Here a layer adds the product of the input and the matrix to the output of
the call that it makes anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.shira.layer import Linear as ShiraLinear
from peft.tuners.shira.model import ShiraModel

from tenant_sdk.kinds.products import added, is_remote


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
