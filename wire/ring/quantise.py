"""The normative int8 quantiser: both sides of a verified session must get the same bytes (wire/SPEC.md, section 5).

Guarantees: results are bit-identical on every platform with IEEE fp32 division and round-half-to-even, checked by
tests/vectors/quantise.json.
"""

from __future__ import annotations

import hashlib
import math

import torch

from wire.errors import InvalidTensor

INT8_MAX = 127
SMALLEST_COLUMN = 1e-8
"""Least value taken for a column's largest magnitude, so that a column of zeros has a scale."""


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds a weight to int8 with one scale per output channel: W ≈ W̃ · diag(α).

    Args:
        weight: shape (in_features, out_features), any float dtype; an nn.Linear's weight is passed transposed.

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
    # This divides by a tensor: on CUDA, torch multiplies by the reciprocal of a plain number, which can differ in the
    # last bit.
    alpha = largest / torch.full_like(largest, INT8_MAX)
    rounded = torch.round(wide / alpha).clamp_(-INT8_MAX, INT8_MAX)
    return rounded.to(torch.int8).contiguous(), alpha


def digest(quantised: torch.Tensor, alpha: torch.Tensor) -> str:
    """Returns the SHA-256 (hex) of W̃ in row-major order, followed by α as little-endian float32."""
    sha = hashlib.sha256(quantised.contiguous().numpy().reshape(-1).data)
    sha.update(alpha.contiguous().numpy().astype("<f4").tobytes())
    return sha.hexdigest()


def max_norms(quantised: torch.Tensor) -> tuple[float, float]:
    """Bounds the Euclidean norms of W̃'s columns and rows from above, never below 1.

    Returns:
        (largest column norm, which bounds the forward product; largest row norm, which bounds the backward one).
    """
    columns, rows = 0.0, torch.zeros(quantised.shape[0], dtype=torch.float64, device=quantised.device)
    for part in quantised.split(4096, dim=1):  # Splitting bounds the scratch memory on wide layers.
        squares = part.to(torch.float64).square_()
        columns = max(columns, float(squares.sum(dim=0).max()))
        rows += squares.sum(dim=1)
    return _norm_bound(columns), _norm_bound(float(rows.max()))


def _norm_bound(squared: float) -> float:
    return max(1.0, math.nextafter(math.sqrt(squared), math.inf))
