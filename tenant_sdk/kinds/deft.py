"""This module implements DEFT over remote layers. DEFT's weight is (I - P·Qᵀ)·W + P·R, for a base weight W of shape
(out_features, in_features). PEFT computes P and Q from one trained matrix of r columns; R is trained, too.

The layers use the output of the call that they make anyway. Only R's initial value, Qᵀ·W, needs a product: r rows in
the backward direction, once when an adapter is made. R is published with the file, so these rows are public
(tenant_sdk/kinds/public_products.py): P and Q start from numbers that anyone can make again, not from the run's seed.
An adapter that is loaded has R in its file.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from peft.tuners.deft.layer import DeftLinear
from peft.tuners.deft.model import DeftModel
from torch import nn

from tenant_sdk.kinds.products import is_remote
from tenant_sdk.kinds.public_products import public_numbers, public_transposed_product


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
