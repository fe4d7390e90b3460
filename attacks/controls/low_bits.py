"""Runs `low-bits` on a bfloat16 mask over float32 rows."""

from __future__ import annotations

import tempfile

import torch

from attacks.adversaries.low_bits import ADVERSARY
from attacks.controls.control import ControlResult
from attacks.controls.known_mask import exchange, inputs_of, record
from attacks.seen.adversary import StolenRows

STRENGTH = 1000.0
_FLOAT32_HALF_STEP = 2.0**-24
"""The largest relative rounding error of the float32 sum of row and mask."""


def right_residues(guess: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns True for each element of a guess that equals the row's element modulo the spacing of bfloat16 numbers at
    the mask's element, up to the rounding of the sum; bool, the shape of `rows`.

    A random guess is right for at most about one element in 2^14, because the tolerance, which is the rounding of the
    sum, is at most about 2^-14 of half that spacing.
    """
    spacing = torch.exp2(torch.floor(torch.log2(mask.abs()))) * 2.0**-7
    off = guess - rows
    off = off - torch.round(off / spacing) * spacing
    return off.abs() <= 2 * _FLOAT32_HALF_STEP * (rows + mask).abs()


def control() -> ControlResult:
    """Computes the share of elements that `right_residues` accepts, over the inputs of all groups. A few in a thousand
    are wrong, because a power of two lies between the sum and its mask."""
    generator = torch.Generator().manual_seed(0x5EED0006)
    sent, masks = [], []
    for group, rows in inputs_of("llama", 1, 12)[0].items():
        strength = STRENGTH * rows.pow(2).mean().sqrt()
        mask = (strength * torch.randn(rows.shape, generator=generator)).to(torch.bfloat16).to(torch.float32)
        masks.append(mask.to(torch.float64))
        sent.append((exchange("llama", group, rows + mask), rows))
    with tempfile.TemporaryDirectory() as folder:
        traffic = record("llama", folder, sent)
        claims = ADVERSARY.attack(traffic.view, traffic.public, None)
    right = [
        right_residues(claim.rows, traffic.truth[claim.seq], masks[claim.seq]).flatten()
        for claim in claims
        if isinstance(claim, StolenRows)
    ]
    return ControlResult(
        ADVERSARY.name, "bfloat16 Gaussian mask of strength 1000", "elements right modulo the mask's grid",
        float(torch.cat(right).to(torch.float64).mean()) if len(right) == len(sent) else 0.0, 0.99, smaller_wins=False,
    )  # fmt: skip
