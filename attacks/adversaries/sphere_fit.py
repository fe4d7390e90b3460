"""Recovers one fixed mask that the provider never sees. Normed rows lie on a sphere, and the mask is the sphere's
centre.

Each masked row is z_t = x_t + n with ‖(x_t − β)/γ‖² = d (γ, β: the norm's weight and bias; d: the number of features).
So u_t = (z_t − β)/γ lies at distance √d from v = n/γ, and 2(u_t − u_s)ᵀ v = ‖u_t‖² − ‖u_s‖² is linear in v: d + 1 rows
determine v. LayerNorm rows also have mean 0, which is one more equation. The attack fails if rows span too few
directions, or if the mask changes. Source: Coope, "Circle fitting by linear and nonlinear least squares", 1993, for the
linear form of a sphere fit.
"""

from __future__ import annotations

import torch

from attacks.seen.adversary import Adversary, Claim, StolenRows
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import Norm, PublicModel
from attacks.seen.view import View

_MOST_MESSAGES = 64
_ROWS_PER_FEATURE = 3
"""The most rows that are used, as a multiple of the number d of features. More than d + 1 rows average out the rounding
of float32, but still more rows would cost more than they gain."""


def attack(view: View, public: PublicModel, opened: Opened | None) -> list[Claim]:
    """Claims unmasked rows of the first messages of every group whose input a norm layer computes. Groups with too few
    rows to fit a mask are left out."""
    norms = public.normed_inputs()
    claims: list[Claim] = []
    for group, norm in norms.items():
        messages = view.with_tensors().select("product", "forward", group)[:_MOST_MESSAGES]
        requests = {message.seq: message.request().to(torch.float64) for message in messages}
        if not requests:
            continue
        rows = torch.cat(list(requests.values()))
        if rows.shape[1] != norm.weight.shape[0] or not bool(torch.isfinite(rows).all()):
            continue
        mask = fit(norm, rows[: _ROWS_PER_FEATURE * rows.shape[1]])
        if mask is not None:
            claims += [StolenRows(seq, request - mask) for seq, request in requests.items()]
    return claims


def fit(norm: Norm, rows: torch.Tensor) -> torch.Tensor | None:
    """Returns the mask of the rows, shape (d,), which is the sphere's centre times the norm's weight. Returns None for
    fewer than d + 1 rows.

    Args:
        norm: the norm that made the unmasked rows; its eps is ignored.
        rows: float64, shape (num_rows, d).
    """
    num_rows, d = rows.shape
    if num_rows < d + 1:
        return None
    points = norm.direction(rows)
    middle = points.mean(0)
    centred = points - middle
    squares = centred.pow(2).sum(1)
    equations, values = 2 * (centred - centred.mean(0)), squares - squares.mean()
    if norm.bias is not None:  # rows have mean 0, so the centre has the same mean as all points
        equations = torch.cat([equations, equations.norm() / d * torch.ones(1, d, dtype=equations.dtype)])
        values = torch.cat([values, values.new_zeros(1)])
    # if rows do not span all directions, gelsd gives the smallest solution
    centre: torch.Tensor = torch.linalg.lstsq(equations, values[:, None], rcond=1e-9, driver="gelsd").solution[:, 0]
    mask: torch.Tensor = (centre + middle) * norm.weight
    return mask


ADVERSARY = Adversary(
    "sphere-fit",
    "one fixed mask that was never seen: normed rows lie on a sphere around it, d + 1 of them give it",
    attack,
)
