"""This module computes what adapters need of a base weight W, from products that a provider makes from masked rows.

Guarantees: gradients are recorded. Every call masks its rows as the model's own calls do. The number of rows depends on
shapes only. A call neither uses nor replaces the outputs that the layers of a group share.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.nn import functional

from tenant_sdk.model import base_products, product_source
from tenant_sdk.model.planned_calls import Course
from tenant_sdk.model.remote_linear import RemoteConv1D, RemoteLinear


def is_remote(target: nn.Module) -> bool:
    """Returns whether a layer, or the layer below a PEFT layer, is at the provider."""
    base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    return isinstance(base, RemoteLinear | RemoteConv1D)


def layer_shape(layer: Any) -> tuple[int, int]:
    """Returns (in_features, out_features) of a remote layer."""
    return (layer.nx, layer.nf) if isinstance(layer, RemoteConv1D) else (layer.in_features, layer.out_features)


def hadamard_product(layer: Any, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Returns x·(W ∘ (up·down)ᵀ), where ∘ multiplies element by element. Each row of x becomes r rows of a call.

    Element j of the result is Σ_k up[j, k]·((x ∘ down[k])·W)[j].

    Args:
        layer: the remote layer whose weight is W.
        x: shape (..., in_features).
        down: shape (r, in_features).
        up: shape (out_features, r).

    Returns:
        shape (..., out_features).
    """
    rows = x.unsqueeze(-2) * down  # (..., r, in_features)
    product: torch.Tensor = layer.without_bias(rows)
    return (product * up.T).sum(-2)


class KnownProduct:
    """Computes rows·Wᵀ for rows that an adapter holds, and records the gradient of rows that are trained.

    Rows that are trained are sent in each forward pass, since they may have changed. Other rows are sent once for each
    course (the state of a run, or of an answer of `generate`). A product is never kept for the next course: a course
    that continues with zeros has zeros as its product, and sending the rows again only after such a course would show
    the provider that a value was not finite.
    """

    def __init__(self) -> None:
        """Makes an object that knows no product."""
        self._asked: weakref.WeakKeyDictionary[Course, tuple[tuple[int, int], torch.Tensor]] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, layer: Any, rows: torch.Tensor) -> torch.Tensor:
        """Returns rows·Wᵀ, shape (num_rows, in_features).

        Args:
            layer: the remote layer whose weight is W.
            rows: a parameter of shape (num_rows, out_features).
        """
        if rows.requires_grad:
            return _WithGradient.apply(rows, layer, _asked(layer, rows))  # type: ignore[no-any-return, no-untyped-call]
        state, course = (rows._version, rows.data_ptr()), base_products.group_of(layer).planned_calls.course
        known = self._asked.get(course)
        if known is None or known[0] != state:
            if product_source.sends_nothing():
                return _asked(layer, rows)
            # Not from a store of replies: the second run of a block finds this product here, and asks for none.
            known = self._asked[course] = (state, base_products.transposed_product(layer, rows).to(rows.dtype))
        return known[1]


def _asked(layer: Any, rows: torch.Tensor) -> torch.Tensor:
    """Returns rows·Wᵀ from this thread's source of products (tenant_sdk/model/product_source.py), which is usually the
    provider."""
    shape = (rows.shape[0], layer_shape(layer)[0])
    return product_source.product(lambda: base_products.transposed_product(layer, rows), shape).to(rows.dtype)


class _WithGradient(torch.autograd.Function):
    """Connects a known product rows·Wᵀ with the rows, whose gradient is a product with W."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, layer: Any, product: torch.Tensor) -> torch.Tensor:
        """Returns the product, and keeps no tensor."""
        ctx.layer, ctx.dtype = layer, rows.dtype
        return product

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Returns the gradient of the rows, grad·W."""
        return base_products.product(ctx.layer, grad).to(ctx.dtype), None, None


def added(result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns result + x·weightᵀ for a matrix that an adapter adds to the base weight.

    Args:
        result: shape (..., out_features).
        x: shape (..., in_features).
        weight: shape (out_features, in_features).
    """
    return result + functional.linear(x, weight.to(x.dtype)).to(result.dtype)
