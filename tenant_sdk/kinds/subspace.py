"""This module finds low-rank parts of a base weight W from products, for adapters that start from such parts.

What is found becomes part of the adapter's file, so it comes from public rows (tenant_sdk/kinds/public_products.py).

Guarantees: the number of calls and rows depends on shapes and settings only. Without `verify` a provider that answers
wrongly decides where such an adapter starts.

Not guaranteed: the exact singular vectors of W. `leading_factors` finds a subspace that holds nearly as much of W.
"""

from __future__ import annotations

from typing import Any

import torch

from tenant_sdk.kinds.products import layer_shape
from tenant_sdk.kinds.public_products import public_numbers, public_product, public_transposed_product
from wire.errors import ConfigurationError

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
        outer = _orthonormal(public_product(layer, rows))
        rows = _orthonormal(public_transposed_product(layer, outer))
    seen = public_product(layer, rows)  # (width, out_features): rows·Wᵀ
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
    columns = public_product(layer, torch.eye(rank, layer_shape(layer)[0]))  # (rank, out_features)
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
