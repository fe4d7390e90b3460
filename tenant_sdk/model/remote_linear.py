"""This module defines base layers whose weights are at the provider. To PEFT and transformers they look like nn.Linear
and Conv1D.

PEFT and transformers can read a remote layer's type, shapes, dtype and device. Code that reads the weight's data gets
an error. If there were a weight of zeros instead, PiSSA, HRA and stock PEFT's DoRA would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tenant_sdk.model.remote_group import RemoteGroup
from tenant_sdk.model.run_state import RunStates
from wire.errors import ConfigurationError

NOT_ATTACHED = "a remote layer was used before TenantClient.load_model attached it"
"""The error text for a layer that does not belong to a model of `TenantClient.load_model`."""


class RemoteWeightError(ConfigurationError, RuntimeError):
    """Says that some code tried to read the data of a weight that stays with the provider."""


class RemoteWeight(torch.Tensor):
    """Represents a weight at the provider: it has the weight's shape, dtype and device, but no data."""

    _is_hf_initialized = True  # transformers' initialisers, which some models call on a weight, then skip it

    @staticmethod
    def __new__(cls, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> RemoteWeight:
        """Returns a new tensor without storage."""
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]
        return made  # type: ignore[no-any-return]

    def __repr__(self) -> str:  # type: ignore[override]
        """Returns a text that shows the shape only."""
        return f"RemoteWeight(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:  # type: ignore[override]
        """Raises RemoteWeightError for every operation that needs the data."""
        raise RemoteWeightError(
            f"{func} needs the data of a base weight, which stays with the provider: "
            "choose a PEFT method that does not read base weights (LoRA, IA3, OFT, VeRA, ... do not); for DoRA in "
            "stock PEFT, pass tenant_sdk.for_remote_base(config); or, where the model itself reads it, choose a "
            "provider that excludes this layer with --base-layers"
        )


class _Remote(nn.Module):
    """Holds the bias of a RemoteLinear or RemoteConv1D and the layer's place in a layer group, but no weight."""

    bias: nn.Parameter | None

    def _init_remote(self, shape: tuple[int, int], out_features: int, bias: bool, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self._weight_shape = shape
        self._anchor_dtype = dtype
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features, dtype=dtype)) if bias else None)
        # The provider adds its own frozen bias in float arithmetic; a tenant that trains the bias adds the difference.
        self.register_buffer("base_bias", None, persistent=False)
        self._group: RemoteGroup | None = None
        self._index = 0
        self._norms: Callable[[], torch.Tensor] | None = None
        self._is_hf_initialized = True

    @property
    def weight(self) -> RemoteWeight:
        """Returns a tensor with the real weight's shape, dtype and device, and no data."""
        device = self.bias.device if self.bias is not None else getattr(self, "_device", torch.device("cpu"))
        dtype = self.bias.dtype if self.bias is not None else self._anchor_dtype
        return RemoteWeight(self._weight_shape, dtype, device)

    @weight.setter
    def weight(self, given: torch.Tensor) -> None:
        """Takes the layer's own weight, which PEFT assigns when it removes an adapter, and changes nothing.

        Raises:
            RemoteWeightError: another tensor is assigned.
        """
        if not isinstance(given, RemoteWeight) or given.shape != self._weight_shape:
            raise RemoteWeightError("a base weight stays with the provider, so no other can take its place")

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Applies the dtype and device of .to(), .half() and .cuda() to this layer, which has no weight to move."""
        probe = fn(torch.empty(0, dtype=self._anchor_dtype, device=getattr(self, "_device", None)))
        self._anchor_dtype, self._device = probe.dtype, probe.device
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def attach(self, group: RemoteGroup, index: int, device: torch.device, norms: Callable[[], torch.Tensor]) -> None:
        """Assigns this module to a layer group; callers must first load the bundle's tensors, which include the bias.

        Args:
            group: the group.
            index: the layer's number in the group, from 0.
            device: the model's device.
            norms: a function that returns the norms of the weight's columns, float32, shape (out_features,).
        """
        self._group, self._index, self._device, self._norms = group, index, device, norms
        if self.bias is not None:
            self.base_bias = group.base_biases[index] = self.bias.detach().clone()

    @property
    def group(self) -> RemoteGroup | None:
        """Returns the layer group that this layer belongs to; None before `attach`."""
        return self._group

    @property
    def index(self) -> int:
        """Returns the layer's number in its group, from 0."""
        return self._index

    def column_norms(self) -> torch.Tensor:
        """Returns the Euclidean norms of the columns of W, one for each output: float32, shape (out_features,).

        Raises:
            ConfigurationError: the provider gives no norms, or the layer is not attached.
            MalformedFrame: the provider's norms cannot be norms.
        """
        if self._norms is None:
            raise ConfigurationError(NOT_ATTACHED)
        return self._norms().to(self._device)

    @property
    def run_states(self) -> RunStates | None:
        """Returns the model's run states, which decide how calls continue after a value that is not finite; None before
        `attach`."""
        return None if self._group is None else self._group.run_states

    @property
    def shares_calls(self) -> bool:
        """Returns whether this layer and others of its group, such as q, k and v, share a call if they get the same
        input."""
        return self._group is not None and len(self._group.member_features) > 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x·W + b; the provider computes x·W under the tenant's mask.

        Args:
            x: shape (..., in_features).

        Returns:
            shape (..., out_features), in the dtype of a local layer's output.
        """
        if self._group is None:
            raise ConfigurationError(NOT_ATTACHED)
        product = self._group.output(self._index, x)
        if self.bias is None:
            return product
        own = self.bias - self.base_bias if self._group.provider_adds_bias else self.bias
        return product + own.to(product.dtype)

    def without_bias(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x·W without the bias, by a call that is not shared with the other layers of the group.

        Args:
            x: shape (..., in_features).

        Returns:
            shape (..., out_features), in the dtype of a local layer's output.
        """
        if self._group is None:
            raise ConfigurationError(NOT_ATTACHED)
        product = self._group.output(self._index, x, is_alone=True)
        if self.bias is None or not self._group.provider_adds_bias:
            return product
        return product - self.base_bias.to(product.dtype)


class RemoteLinear(_Remote, nn.Linear):  # type: ignore[misc]
    """Replaces an nn.Linear whose weight is at the provider."""

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        """Takes the shapes that nn.Linear takes; callers must call `attach` before the module can run."""
        self._init_remote((out_features, in_features), out_features, bias, dtype)
        self.in_features, self.out_features = in_features, out_features


class RemoteConv1D(_Remote, Conv1D):  # type: ignore[misc]
    """Replaces a transformers Conv1D whose weight, stored as (in, out), is at the provider."""

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype) -> None:
        """Takes the shapes of Conv1D(nf=out_features, nx=in_features); callers must then call `attach`."""
        self._init_remote((in_features, out_features), out_features, bias, dtype)
        self.nx, self.nf = in_features, out_features
