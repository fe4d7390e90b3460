"""Base layers whose weights are at the provider: modules that look like nn.Linear and Conv1D and hold no weight.

PEFT and transformers ask a base layer for its type, shapes, dtype and device, and get them; code that reads the
weight's data gets an error that says so. (A weight of zeros would make DoRA, PiSSA and HRA silently wrong.)
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tenant_sdk.model.planned_calls import PlannedCalls
from tenant_sdk.model.remote_group import RemoteGroup
from wire.errors import ConfigurationError


class RemoteWeightError(ConfigurationError, RuntimeError):
    """Some code asked for the data of a weight that stays with the provider."""


class RemoteWeight(torch.Tensor):
    """A tensor with the shape, dtype and device of a weight, and without data."""

    _is_hf_initialized = True  # transformers' initialisers, which some models call on a child's weight, leave it alone

    @staticmethod
    def __new__(cls, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> RemoteWeight:
        """Makes a tensor without storage."""
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]
        return made  # type: ignore[no-any-return]

    def __repr__(self) -> str:  # type: ignore[override]
        """Shows the shape only."""
        return f"RemoteWeight(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        """Refuses every operation on the data."""
        raise RemoteWeightError(
            f"{func} needs the data of a base weight, which stays with the provider: "
            "choose a PEFT method that does not read base weights (LoRA, IA3, OFT, VeRA, ... do not), or, where the "
            "model itself reads it, a provider that excludes this layer with --base-layers"
        )


class _Remote(nn.Module):
    """What RemoteLinear and RemoteConv1D share: a place in a group and a bias, but no weight."""

    bias: nn.Parameter | None

    def _init_remote(self, shape: tuple[int, int], out_features: int, bias: bool, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self._weight_shape = shape
        self._anchor_dtype = dtype
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features, dtype=dtype)) if bias else None)
        # The provider adds its own frozen bias in float arithmetic; a tenant that trains the bias adds the rest.
        self.register_buffer("base_bias", None, persistent=False)
        self._group: RemoteGroup | None = None
        self._index = 0
        self._is_hf_initialized = True

    @property
    def weight(self) -> RemoteWeight:
        """A stand-in with the real weight's shape, dtype and device."""
        device = self.bias.device if self.bias is not None else getattr(self, "_device", torch.device("cpu"))
        dtype = self.bias.dtype if self.bias is not None else self._anchor_dtype
        return RemoteWeight(self._weight_shape, dtype, device)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Follows .to(), .half() and .cuda() although there is no parameter to move."""
        probe = fn(torch.empty(0, dtype=self._anchor_dtype, device=getattr(self, "_device", None)))
        self._anchor_dtype, self._device = probe.dtype, probe.device
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def attach(self, group: RemoteGroup, index: int, device: torch.device) -> None:
        """Gives the module its place in a group, after the bundle's tensors are loaded."""
        self._group, self._index, self._device = group, index, device
        if self.bias is not None:
            self.base_bias = self.bias.detach().clone()

    @property
    def planned_calls(self) -> PlannedCalls | None:
        """The model's courses, which decide how calls go on after a value that is not finite; None before `attach`."""
        return None if self._group is None else self._group.planned_calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x·W + b, computed by the provider under the tenant's mask. Shapes are those of a local layer."""
        if self._group is None:
            raise ConfigurationError("a remote layer was used before TenantClient.load_model attached it")
        product = self._group.output(self._index, x)
        if self.bias is None:
            return product
        own = self.bias - self.base_bias if self._group.provider_adds_bias else self.bias
        return product + own.to(product.dtype)


class RemoteLinear(_Remote, nn.Linear):  # type: ignore[misc]
    """An nn.Linear whose weight is at the provider."""

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        """Takes shapes as nn.Linear does; the module cannot run before `attach`."""
        self._init_remote((out_features, in_features), out_features, bias, dtype)
        self.in_features, self.out_features = in_features, out_features


class RemoteConv1D(_Remote, Conv1D):  # type: ignore[misc]
    """A transformers Conv1D (weight stored as (in, out)) whose weight is at the provider."""

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        """Takes shapes as Conv1D(nf=out_features, nx=in_features) does; the module cannot run before `attach`."""
        self._init_remote((in_features, out_features), out_features, bias, dtype)
        self.nx, self.nf = in_features, out_features
