"""This module implements the normative int8 quantiser. Both sides of a verified session must get the same bytes from it
(wire/SPEC.md, section 5).

Guarantees: results are bit-identical on every platform with IEEE fp32 division and round-half-to-even, which
tests/vectors/quantise.json checks.
"""

from __future__ import annotations

import hashlib
import math

import torch

from wire.errors import InvalidTensor
from wire.limits import INT8_MAX as INT8_MAX

QUANTISER_VERSION = 1
"""The version of the rule by which `quantise` rounds: weights that another version kept on disk are not used."""
SMALLEST_COLUMN = 1e-8
"""The smallest value that is used as a column's largest magnitude, so that a column of zeros has a scale above zero."""
MOST_SQUARES = 1 << 24
"""How many squares `square_sums` holds at a time, 128 MiB. Their sums are exact, so it changes no bit."""


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds a weight W to int8 with one scale for each output channel: W ≈ W̃ · diag(α).

    Args:
        weight: W, shape (in_features, out_features), any float dtype. Callers pass the weight of an nn.Linear
            transposed.

    Returns:
        W̃, int8, same shape, contiguous, values in [−127, 127]; α, float32, shape (out_features,).

    Raises:
        InvalidTensor: the weight is not a matrix, or has a value that is not finite.
    """
    if weight.dim() != 2:
        raise InvalidTensor(f"a weight is a matrix, got {weight.dim()} dimensions")
    wide = weight.detach().to(torch.float32)
    if not bool(torch.isfinite(wide).all()):
        raise InvalidTensor("a base weight holds NaN or infinity")
    largest = wide.abs().amax(dim=0).clamp_min(SMALLEST_COLUMN)
    # The divisor is a tensor: if it were a plain number, torch on CUDA would multiply by its reciprocal, and the result
    # could differ in the last bit.
    alpha = largest / torch.full_like(largest, INT8_MAX)
    rounded = torch.round(wide / alpha).clamp_(-INT8_MAX, INT8_MAX)
    return rounded.to(torch.int8).contiguous(), alpha


def digest(quantised: torch.Tensor, alpha: torch.Tensor) -> str:
    """Returns the SHA-256 (hex) of a quantised weight: of W̃ in row-major order, followed by α as little-endian
    float32."""
    sha = hashlib.sha256(quantised.contiguous().numpy().reshape(-1).data)
    sha.update(alpha.contiguous().numpy().astype("<f4").tobytes())
    return sha.hexdigest()


def max_norms(quantised: torch.Tensor) -> tuple[float, float]:
    """Returns upper bounds of the Euclidean norms of W̃'s columns and rows. No bound is below 1.

    Returns:
        (bound of the column norms, for the forward product; bound of the row norms, for the backward product).
    """
    return norm_bounds(*square_sums(quantised))


def square_sums(quantised: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the exact sums of the squares of W̃'s columns and rows: float64, shapes (out_features,) and
    (in_features,)."""
    columns = []
    rows = torch.zeros(quantised.shape[0], dtype=torch.float64, device=quantised.device)
    for part in quantised.split(max(1, MOST_SQUARES // max(1, quantised.shape[0])), dim=1):
        squares = part.to(torch.float64).square_()
        columns.append(squares.sum(dim=0))
        rows += squares.sum(dim=1)
    return torch.cat(columns), rows


def norm_bounds(column_squares: torch.Tensor, row_squares: torch.Tensor) -> tuple[float, float]:
    """Returns the result of `max_norms` from the results of `square_sums`. If layers are joined, their column sums are
    concatenated and their row sums added."""
    return _norm_bound(float(column_squares.max())), _norm_bound(float(row_squares.max()))


def column_norms(weight: torch.Tensor, alpha: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the Euclidean norms of the columns of W̃·diag(α), or of a weight that is not quantised.

    Both sides of a verified session get the same bits from W̃ and α: the sums of squares of integers are exact in
    float64, and the square root, the product and the rounding to float32 are those of IEEE arithmetic.

    Args:
        weight: W̃, int8, or a weight of any float dtype; shape (in_features, out_features).
        alpha: α, float32, shape (out_features,); None for a weight that is not quantised.

    Returns:
        float32, shape (out_features,).
    """
    parts = weight.split(4096, dim=1)  # Splitting bounds the scratch memory on wide layers.
    return norms_of_columns(torch.cat([part.to(torch.float64).square_().sum(dim=0) for part in parts]), alpha)


def norms_of_columns(column_squares: torch.Tensor, alpha: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the result of `column_norms` from the sums of squares of the columns, float64."""
    norms = column_squares.sqrt()
    return (norms if alpha is None else norms * alpha.to(torch.float64)).to(torch.float32)


def _norm_bound(squared: float) -> float:
    return max(1.0, math.nextafter(math.sqrt(squared), math.inf))
