"""Implements `leaked-secret`, which recovers all rows of a block, up to the error, from the block's secret.

No view holds a secret, so this adversary claims nothing on a recording, and that says nothing about the mask. This
adversary is in the catalogue because of its control. The control tests the mathematics with which the other adversaries
of the lattice mask unmask a block, with the true secret and with a wrong one.
"""

from __future__ import annotations

import torch

from attacks.adversaries.ring_lwe import PublicMatrix, centred
from attacks.seen.adversary import Adversary, Claim
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import PublicModel
from attacks.seen.view import View


def open_block(rows: torch.Tensor, public: PublicMatrix, secret: torch.Tensor) -> torch.Tensor:
    """Returns x̃ + e, the encoded rows plus the error, for the first rows of a block.

    Args:
        rows: int32 or int64, shape (num_rows, features), as recorded; at most N rows, the ring degree.
        public: the matrix A.
        secret: k ternary polynomials of N coefficients, shape (k, N) or (k·N,).

    Returns:
        The unmasked rows, int64, shape of `rows`, centred mod 2^32.
    """
    flat = secret.reshape(-1).to(torch.int64)
    masks = torch.stack([public.mask(flat, offset) for offset in range(rows.shape[0])])
    return centred(rows.to(torch.int64) - masks)


def attack(view: View, model: PublicModel, opened: Opened | None = None) -> list[Claim]:
    """Claims nothing, because no recording holds a secret."""
    return []


ADVERSARY = Adversary(
    "leaked-secret", "the unmasking maths alone, for its control: no view holds a secret to use it on", attack
)
