"""`leaked-secret`: shows what a block's secret is worth to an adversary that has it: all rows, up to the error.

No view holds a secret, so on a recording this adversary claims nothing, which says nothing about the mask. It is in the
catalogue for its control, which tests the mathematics by which the other adversaries of the lattice mask open a block,
on the true secret and on a wrong one.
"""

from __future__ import annotations

import torch

from attacks.adversaries.ring_lwe import PublicMatrix, centred
from attacks.seen.adversary import Adversary, Claim
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import PublicModel
from attacks.seen.view import View


def open_block(rows: torch.Tensor, public: PublicMatrix, secret: torch.Tensor) -> torch.Tensor:
    """Returns x̃ + e of the first rows of a block.

    Args:
        rows: int32 or int64, shape (num_rows, features), num_rows ≤ N, as recorded.
        public: the matrix A.
        secret: ternary, shape (k, N) or (k·N,).

    Returns:
        int64, shape of `rows`, centred.
    """
    flat = secret.reshape(-1).to(torch.int64)
    masks = torch.stack([public.mask(flat, offset) for offset in range(rows.shape[0])])
    return centred(rows.to(torch.int64) - masks)


def attack(view: View, model: PublicModel, opened: Opened | None = None) -> list[Claim]:
    """Claims nothing; the module's docstring says why."""
    return []


ADVERSARY = Adversary(
    "leaked-secret", "the unmasking maths alone, for its control: no view holds a secret to use it on", attack
)
