"""This module computes what adapters need of a base weight W, which the tenant does not have, from products that the
provider makes.

Products for a forward or backward pass are made from masked rows.

Numbers that become part of an adapter's file, such as the low-rank parts of W from which some kinds of adapters start,
are made from public rows, in the open. Under a mask such as `lattice`, noise is left in a product. If the product is
published, and its rows are known, then whoever knows the weight learns the noise, hence the mask's secret, and with it
other rows under the same secret (docs/threat-model.md, "Rows without a mask"). So an adapter's start is found with rows
that hold nothing of the tenant: unit rows, rows of random numbers that anyone can make again, and what follows from
these and from the replies to them. They need no mask, and no mask's noise is in their products.

`SavedSettings` is for adapters that are trained as one kind and saved as another, as PSOFT is saved as plain LoRA.

Guarantees for masked rows: gradients are recorded. Every call masks its rows as the model's own calls do. The number of
rows depends on shapes only. A call neither uses nor replaces the outputs that the layers of a group share.

Guarantees for public rows: with `verify` every reply is checked. The number of calls and rows depends on shapes only,
and for low-rank parts on settings too, whatever a provider answers: numbers that are not finite, or so large that sums
of their squares are not, are replaced.

Not guaranteed: the exact singular vectors of W; `leading_factors` finds a subspace that holds nearly as much of W.
Not guaranteed without `verify` is where an adapter starts that starts from such parts: a provider that answers wrongly
decides it.
"""

from __future__ import annotations

import weakref
from typing import Any, Self

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.nn import functional

from tenant_sdk.model import base_products
from tenant_sdk.model.base_products import group_of
from tenant_sdk.model.remote_group import RemoteGroup
from tenant_sdk.model.remote_linear import RemoteConv1D, RemoteLinear
from tenant_sdk.model.run_state import RunOutcome
from wire.errors import ConfigurationError
from wire.frame import Direction


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
    run, and for each answer of `generate`. A product is never kept for the next one: a run that continues with zeros
    has zeros as its product, and sending the rows again only after such a run would show the provider that a value was
    not finite.
    """

    def __init__(self) -> None:
        """Makes an object that knows no product."""
        self._asked = weakref.WeakKeyDictionary[RunOutcome, tuple[tuple[int, int], torch.Tensor]]()

    def of(self, layer: Any, rows: torch.Tensor) -> torch.Tensor:
        """Returns rows·Wᵀ, shape (num_rows, in_features).

        Args:
            layer: the remote layer whose weight is W.
            rows: a parameter of shape (num_rows, out_features).
        """
        if rows.requires_grad:
            return _WithGradient.apply(rows, layer, _asked(layer, rows))  # type: ignore[no-any-return, no-untyped-call]
        version, run = (rows._version, rows.data_ptr()), group_of(layer).run_states.current
        known = self._asked.get(run.outcome)
        if known is None or known[0] != version:
            if run.source.sends_nothing:
                return _asked(layer, rows)
            # Not from a store of replies: the second run of a block finds this product here, and asks for none.
            known = self._asked[run.outcome] = (version, base_products.transposed_product(layer, rows).to(rows.dtype))
        return known[1]


def _asked(layer: Any, rows: torch.Tensor) -> torch.Tensor:
    """Returns rows·Wᵀ from this thread's source of products (tenant_sdk/model/run_state.py), which is usually the
    provider."""
    source = group_of(layer).run_states.current.source
    source.see(rows)
    product = source.given((rows.shape[0], layer_shape(layer)[0]))
    if product is None:
        product = base_products.transposed_product(layer, rows)
        source.keep(product)
    return product.to(rows.dtype)


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
        return base_products.product(ctx.layer, grad).to(ctx.dtype), None, None


def added(result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns result + x·weightᵀ for a matrix that an adapter adds to the base weight.

    Args:
        result: shape (..., out_features).
        x: shape (..., in_features).
        weight: shape (out_features, in_features).
    """
    return result + functional.linear(x, weight.to(x.dtype)).to(result.dtype)


_LARGEST = 1e15
"""The bound on a number of a reply. Sums of squares of such numbers are finite in float32, and no weight is near it."""


@torch.no_grad()
def public_group_products(group: RemoteGroup, rows: torch.Tensor) -> list[torch.Tensor]:
    """Returns rows·W for each layer of a group, without biases; the rows are public.

    Args:
        group: the group.
        rows: shape (num_rows, in_features).

    Returns:
        For each layer, in the order of the manifest: float32, shape (num_rows, out_features of the layer).
    """
    parts = list(group.run_public(Direction.FORWARD, rows).split(group.member_features, dim=1))
    biases = group.base_biases if group.provider_adds_bias else [None] * len(parts)
    return [_bounded(part if bias is None else part - bias) for part, bias in zip(parts, biases, strict=True)]


def _public_product(layer: Any, rows: torch.Tensor) -> torch.Tensor:
    """Returns rows·W for one layer, without the bias; the rows are public.

    Args:
        layer: the remote layer whose weight is W.
        rows: shape (num_rows, in_features).
    """
    return public_group_products(group_of(layer), rows)[int(layer.index)]


@torch.no_grad()
def public_transposed_product(layer: Any, rows: torch.Tensor) -> torch.Tensor:
    """Returns rows·Wᵀ for one layer; the rows are public.

    Args:
        layer: the remote layer whose weight is W.
        rows: shape (num_rows, out_features).
    """
    group = group_of(layer)
    parts = [rows.new_zeros(rows.shape[0], features) for features in group.member_features]
    parts[layer.index] = rows.detach()
    return _bounded(group.run_public(Direction.BACKWARD, torch.cat(parts, dim=1)))


def public_numbers(layer: Any) -> torch.Generator:
    """Returns a generator of numbers that anyone can make again: they depend on the layer's place in the model only."""
    group = group_of(layer)
    return torch.Generator().manual_seed(group.spec.id * len(group.member_features) + int(layer.index))


def _bounded(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.nan_to_num(0.0, 0.0, 0.0).clamp(-_LARGEST, _LARGEST)


OVERSAMPLING = 8
"""The rows that an iteration has beyond the rank that is asked for. With 5 to 10 more, subspace iteration comes close
to the best subspace (Halko, Martinsson, Tropp, SIAM Review 53, 2011, section 4)."""
ITERATIONS = 8
"""The number of iterations where PEFT's settings name none. With it a subspace of rank 4 holds 99% of
what the best one holds of random weights (tests/tenant_sdk/kinds/test_products.py)."""


@torch.no_grad()
def leading_factors(layer: Any, rank: int, iterations: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns approximate leading singular vectors and values of W, by randomised subspace iteration.

    Args:
        layer: the remote layer whose weight is W, seen as a matrix of shape (out_features, in_features).
        rank: the number of singular values.
        iterations: the number of iterations; each makes one call in each direction. One more forward call follows.

    Returns:
        (left, values, right) of float32, with W ≈ left · diag(values) · right: shapes (out_features, rank), (rank,) and
        (rank, in_features). The columns of `left` and the rows of `right` are orthonormal.

    Source: Halko, Martinsson, Tropp, SIAM Review 53 (2011), algorithm 4.4.
    """
    width = min(rank + OVERSAMPLING, layer_shape(layer)[0], layer_shape(layer)[1])
    rows = torch.randn(width, layer_shape(layer)[0], generator=public_numbers(layer))
    for _ in range(iterations):
        outer = _orthonormal(_public_product(layer, rows))
        rows = _orthonormal(public_transposed_product(layer, outer))
    seen = _public_product(layer, rows)  # (width, out_features): rows·Wᵀ
    turn, values, outer = torch.linalg.svd(seen, full_matrices=False)
    return outer[:rank].T.contiguous(), values[:rank], turn.T[:rank] @ rows


@torch.no_grad()
def leading_columns(layer: Any, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the first columns of Q and rows of R in W = Q·R, by two calls of `rank` rows.

    Args:
        layer: the remote layer whose weight is W, seen as a matrix of shape (out_features, in_features).
        rank: the number of columns.

    Returns:
        (Q's columns, R's rows) of float32, shapes (out_features, rank) and (rank, in_features).
    """
    columns = _public_product(layer, torch.eye(rank, layer_shape(layer)[0]))  # (rank, out_features)
    outer = torch.linalg.qr(columns.T).Q.contiguous()
    return outer, public_transposed_product(layer, outer.T)


def check_rank(layer: Any, rank: int) -> None:
    """Checks that a weight has as many singular values as a rank asks for.

    Raises:
        ConfigurationError: the rank is too large.
    """
    if rank > min(layer_shape(layer)):
        raise ConfigurationError(f"expected a rank of at most {min(layer_shape(layer))} for this layer, got {rank}")


def _orthonormal(rows: torch.Tensor) -> torch.Tensor:
    """Returns rows that span the same space as `rows` and are orthonormal."""
    return torch.linalg.qr(rows.T).Q.T  # type: ignore[no-any-return]


class SavedSettings:
    """Serves as a mixin for PEFT's classes of settings. A subclass overrides `to_dict`, from which PEFT writes an
    adapter's settings file, so that the file has the settings of the kind as which the adapter is saved."""

    @classmethod
    def of(cls, config: Any) -> Self:
        """Returns an object of this class that holds the settings of `config`."""
        made = cls.__new__(cls)
        made.__dict__.update(config.__dict__)
        return made
