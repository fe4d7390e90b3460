"""Computes negacyclic products in a slow and obvious way, for comparison with noise/polynomial/."""

from __future__ import annotations

import torch


def reference_product(matrix: torch.Tensor, secrets: torch.Tensor) -> torch.Tensor:
    """Returns the products mod 2^32, as schoolbook sums in integers with X^N = −1. `combine` and `product` of
    noise/polynomial/ must equal them.

    Args:
        matrix: int32, shape (k·N, features).
        secrets: int8, shape (B, k, N).

    Returns:
        int32, shape (B, N, features).
    """
    num_blocks, rank, degree = secrets.shape
    polynomials = matrix.to(torch.int64).view(rank, degree, -1)
    total = torch.zeros(num_blocks, degree, matrix.shape[1], dtype=torch.int64, device="cpu")
    for shift in range(degree):
        for i in range(rank):
            # This is X^shift times polynomial i: coefficients that pass X^N come back negated.
            turned = torch.cat((-polynomials[i, degree - shift :], polynomials[i, : degree - shift]))
            total += secrets[:, i, shift].to(torch.int64).view(-1, 1, 1) * turned
    return ((total + 2**31) % 2**32 - 2**31).to(torch.int32)
