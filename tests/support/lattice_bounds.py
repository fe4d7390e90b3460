"""Computes how far a product under a lattice mask may be from the exact product."""

from __future__ import annotations

import math

import torch

from noise import sampling
from noise.params import LatticeParameters
from noise.scheme import GroupSpec, encode_rows
from wire.frame import Direction

ETA = 21
"""The largest error of the centred binomial, which is a sum of 21 bits minus another sum of 21 bits."""
FP32 = 2.0**-22
"""The relative error of a few fp32 operations (2^-24 each): the quotient, the scale, α and the product."""


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor converted to float64."""
    return tensor.to(torch.float64)


def bounds(
    spec: GroupSpec, direction: Direction, weight: torch.Tensor, rows: torch.Tensor, parameters: LatticeParameters,
    hint_error: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Returns the exact product and the largest distance of a masked one from it, both of shape (num_rows, cols), and
    the scales β of the encoded rows, which broadcast to this shape; all are float64.

    The input v is x, or g ⊙ α for gradients. Encoding changes it by ‖v − β·ṽ‖∞ ≤ β/2 and a few fp32 roundings. The
    mask adds an error row e with ‖e‖₂ ≤ e_max·√d. Each of the k·N coefficients of the hint that a secret multiplies is
    off by at most `hint_error`. Let w be a column of the weight (or of its transpose), and a the output scale (α or 1).
    Then, by Cauchy-Schwarz,
    |y − v·w·a| ≤ a·(‖w‖₂·(β·√d/2 + FP32·‖v‖₂ + β·e_max·√d) + β·hint_error·k·N), and fp32 rounding of y itself.
    """
    is_forward = direction is Direction.FORWARD
    matrix = wide(weight if is_forward else weight.t())
    given = wide(rows) * (1.0 if is_forward else wide(spec.alpha))
    out_scale = wide(spec.alpha) if is_forward else torch.ones(matrix.shape[1], dtype=torch.float64)
    d, largest = rows.shape[1], sampling.error_bound(parameters)
    _, beta = encode_rows(spec, direction, rows, largest * math.sqrt(d), float(hint_error * parameters.dimension))
    scale = wide(beta)
    reach = scale * math.sqrt(d) * (0.5 + largest) + FP32 * given.norm(dim=1, keepdim=True)
    exact = (given @ matrix) * out_scale
    bound = out_scale * (reach * matrix.norm(dim=0) + scale * hint_error * parameters.dimension)
    return exact, bound + FP32 * exact.abs(), scale
