"""This module implements GLoRA over remote layers. GLoRA's weight is W + W ∘ A + B, its bias is b + b ∘ D + E + W·C,
where ∘ multiplies element by element.

If A has a low rank r (`config_A_B="lora"`, the default), the product with W ∘ A takes r rows for each row of the input,
in a call of its own. If A is a vector or a number, the layer computes this product from the output of the call that it
makes anyway. W·C takes one row in a call of its own. A layer without a bias b uses neither C nor D nor E.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.glora.layer import GloraEmptyPath, GloraLinear, GloraLoraPath
from peft.tuners.glora.model import GloraModel

from tenant_sdk.kinds.products import added, hadamard_product, is_remote
from wire.errors import ConfigurationError


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
