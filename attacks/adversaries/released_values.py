"""Implements `released-values`, which recovers the secret of a lattice mask from results that the tenant releases, such
as logits.

A client of the tenant's endpoint and the provider work together. The client knows the prompts that it sent, and so
their encoded rows x̃. The provider received the masked rows z = x̃ + A·s + e mod 2^32, with the public matrix A, the
secret s and the error e. The tenant released the results y = (x̃ + e)·W̃ of a layer, with the public integer weight W̃
and y in units of this integer product. If there are as many results as features, least squares on y − x̃·W̃ give e.
Then z − x̃ − e = A·s mod 2^32 holds exactly, and linear algebra gives s, as in `no-error`. With s, the provider unmasks
all rows under the same secret, also those of other clients, up to their errors. If results are rounded, or only a few
are released for each row, least squares do not give e.

No recording holds released results, so this adversary claims nothing on a recording, and that says nothing about the
mask. This adversary is in the catalogue because of its control. Source: docs/threat-model.md, "What would break it, and
what stops that".
"""

from __future__ import annotations

import torch

from attacks.adversaries.no_error import ExactSystem
from attacks.adversaries.ring_lwe import centred
from attacks.seen.adversary import Adversary, Claim
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import PublicModel
from attacks.seen.view import View
from wire.ring.seeded_rows import SeededRows


def seek_error(released: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns the errors e that explain the released results best, int64, shape of `rows`.

    Args:
        released: the results y = (x̃ + e)·W̃ that the client was given, float64, shape (num_rows, num_given).
        rows: the encoded rows x̃ of the client's prompts, int64, shape (num_rows, features).
        weight: the columns of W̃ that gave the results, shape (features, num_given).
    """
    wide = weight.to(torch.float64)
    rest = released - rows.to(torch.float64) @ wide
    found: torch.Tensor = torch.linalg.lstsq(wide.T, rest.T, driver="gelsd").solution.T
    return found.round().to(torch.int64)


def seek_secret(
    sent: torch.Tensor, rows: torch.Tensor, error: torch.Tensor, seed: SeededRows, ring_degree: int
) -> torch.Tensor | None:
    """Returns the secret of a block (the rows under one secret): k polynomials of N coefficients, int64, shape (k·N,).
    Returns None if there are too few rows, or if a number of `error` that is used is wrong.

    Args:
        sent: the masked rows that the provider received, from the first row of the block on; int32.
        rows: the encoded rows x̃, int64, the same shape.
        error: the errors that `seek_error` found, int64, the same shape.
        seed: the seed of the public matrix.
        ring_degree: N, the ring degree.
    """
    system = ExactSystem(seed, ring_degree, sent.shape[1])
    masks = centred(sent.to(torch.int64) - rows - error).reshape(-1)[: system.num_equations]
    return system.secret(masks) if len(masks) == system.num_equations else None


def attack(view: View, model: PublicModel, opened: Opened | None = None) -> list[Claim]:
    """Claims nothing, because no recording holds what a tenant released."""
    return []


ADVERSARY = Adversary(
    "released-values", "logits given to who knows the prompt, for its control: no view holds released numbers", attack
)
