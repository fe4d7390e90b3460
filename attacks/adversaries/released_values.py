"""Implements `released-values`: a client of an endpoint who knows prompts finds the error in numbers that it is given,
and with the error the secret, which opens everybody's rows of the block.

Where the tenant releases results of a layer, such as logits, each is y = x̃·W̃ + e·W̃ in the units of the product. The
weights are public. Who knows the prompt knows x̃; least squares give e, in whole numbers if there are as many results as
features. The provider holds the masked row z = x̃ + A·s + e, so that z − x̃ − e = A·s exactly, and linear algebra gives s
as from a mask without an error (no_error.py). Rounded results, or a few for each row, leave e open.

No recording holds released numbers, so this adversary claims nothing on one, and that says nothing about the mask. It
is in the catalogue for its control. Source: docs/threat-model.md, "What would break it, and what stops that".
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
    """Returns the errors that explain the released numbers best, int64, shape of `rows`.

    Args:
        released: the results that the client was given, in units of the product; float64, shape (num_rows, num_given).
        rows: the encoded rows x̃ of its prompts, int64, shape (num_rows, features).
        weight: the columns of the weight that belong to the results, shape (features, num_given).
    """
    wide = weight.to(torch.float64)
    rest = released - rows.to(torch.float64) @ wide
    found: torch.Tensor = torch.linalg.lstsq(wide.T, rest.T, driver="gelsd").solution.T
    return found.round().to(torch.int64)


def seek_secret(
    sent: torch.Tensor, rows: torch.Tensor, error: torch.Tensor, seed: SeededRows, ring_degree: int
) -> torch.Tensor | None:
    """Returns the secret of a block, int64, shape (k·N,), or None if the error is wrong anywhere.

    Args:
        sent: the masked rows, as the provider receives them, from the first row of a block; int32.
        rows, error: what is known and what was found of these rows, int64, the same shape.
        seed: the seed of the public matrix.
        ring_degree: N.
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
