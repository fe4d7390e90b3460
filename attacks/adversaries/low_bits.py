"""Recovers the low bits of rows under a float mask that has a coarser grid than the data.

A bfloat16 mask has 8 significant bits. If such a mask n is added to a float32 row x, the sum z = x + n still shows x
modulo the mask's grid. The grid spacing of an element is 2^-7 times the power of two below |n|. If the mask is strong,
this power of two is also the one below |z|, except for a few elements next to a power of two. The adversary claims the
centred residue, which is x itself if |x| is below half the grid. The attack does not apply to ring arithmetic, in which
rows and masks are integers on one grid. Source: the definition of bfloat16.
"""

from __future__ import annotations

import torch

from attacks.seen.adversary import Adversary, Claim, StolenRows
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import PublicModel
from attacks.seen.view import View

_BFLOAT16_STEPS = 2.0**-7
"""The spacing of bfloat16 numbers between 1 and 2."""
_MOST_MESSAGES = 512


def attack(view: View, public: PublicModel, opened: Opened | None) -> list[Claim]:
    """Claims the centred residue of the first `_MOST_MESSAGES` messages modulo the grid of a bfloat16 mask."""
    claims: list[Claim] = []
    for message in view.with_tensors().select("product")[:_MOST_MESSAGES]:
        rows = message.request().to(torch.float64)
        claims.append(StolenRows(message.seq, residue(rows, grid(rows))))
    return claims


def grid(rows: torch.Tensor) -> torch.Tensor:
    """Returns, for each element of the masked rows, the grid spacing of a bfloat16 mask that is much larger than the
    row."""
    exponent = torch.floor(torch.log2(rows.abs().clamp_min(1e-30)))
    return torch.exp2(exponent) * _BFLOAT16_STEPS


def residue(rows: torch.Tensor, spacing: torch.Tensor) -> torch.Tensor:
    """Returns the rows modulo the spacing, as numbers between minus and plus half of the spacing."""
    return rows - torch.round(rows / spacing) * spacing


ADVERSARY = Adversary(
    "low-bits",
    "a float mask on a coarser grid than the data, such as bfloat16: the data modulo the grid",
    attack,
)
