"""Implements `collusion`, `leaked-secret` and `released-values`: what a provider could do with somebody's help.

The help is that of the second provider of `shares`, of whoever has a block's secret, or of a client who knows prompts
and gets their results. No recording of one provider holds any of this. So these adversaries claim nothing on a view,
and their silence says nothing about the mask. They are in the catalogue because of their controls.
"""

from __future__ import annotations

from collections import defaultdict, deque

import torch

from attacks.adversaries.lattice_equations import ExactSystem
from attacks.adversaries.ring_lwe import PublicMatrix, centred
from attacks.seen.adversary import Adversary, Claim, StolenRows
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import PublicModel
from attacks.seen.view import Message, View
from wire.errors import ConfigurationError
from wire.ring.seeded_rows import SeededRows

# ---- collusion ------------------------------------------------------------------------------------------------------
#
# Implements `collusion`, in which the two providers of the mask `shares` combine what they received and recover the
# rows.
#
# One provider received x̃ − expand(p) mod 2^32. Here x̃ are the encoded rows, and expand(p) are the pseudorandom
# numbers that a seed p of 32 bytes gives. The other provider received p. The first message plus expand(p) is exactly
# x̃. The mask `shares` is secure only if the two providers do not collude, and this shows what happens if they do.
# A view (what one provider sees) holds either numbers that look uniform, or seeds. So this adversary claims nothing on
# a single view. Its silence says nothing about the mask.
#
# Source: docs/masks.md, "shares"; wire/SPEC.md, section 5, for expand.

_CallKey = tuple[int, str, int]
"""The key of a call, which both providers see: (group, direction, number of rows)."""


def collude(view_1: View, view_2: View) -> list[StolenRows]:
    """Recovers the encoded rows x̃ of each message of the first view whose seed is in the second view. Each claim
    carries the message's number in the first view.

    Among the calls of one group, direction and number of rows, the n-th seed is matched with the n-th message. This is
    correct if there is one stream of calls, such as one tenant at a time.

    Args:
        view_1: the view of one tenant at the provider that received masked rows.
        view_2: the view of the same tenant at the provider that received seeds.

    Raises:
        ConfigurationError: the two views are of different models.
    """
    if view_1.manifest.groups != view_2.manifest.groups:
        raise ConfigurationError("the two recordings are of different models: their manifests differ")
    seeds: dict[_CallKey, deque[SeededRows]] = defaultdict(deque)
    for message in view_2.with_tensors().select("hint"):
        seeds[_key(message)].append(message.seeded_rows())
    stolen = []
    for message in view_1.with_tensors().select("product"):
        if message.arithmetic == "ring" and seeds[_key(message)]:
            hidden = message.request()
            share = seeds[_key(message)].popleft().expand(hidden.shape[1])
            stolen.append(StolenRows(message.seq, (hidden + share).to(torch.float64)))  # wraps mod 2^32
    return stolen


def _key(message: Message) -> _CallKey:
    return message.group, message.direction, message.num_rows


def _attack_collusion(view: View, model: PublicModel, opened: Opened | None = None) -> list[Claim]:
    """Claims nothing, because the view of one provider alone does not show the rows."""
    return []


COLLUSION = Adversary(
    "collusion", "both providers of `shares` add what they got; one view alone has nothing to add", _attack_collusion
)


# ---- leaked-secret --------------------------------------------------------------------------------------------------
#
# Implements `leaked-secret`, which recovers all rows of a block, up to the error, from the block's secret.
#
# No view holds a secret, so this adversary claims nothing on a recording, and that says nothing about the mask. This
# adversary is in the catalogue because of its control. The control tests the mathematics with which the other
# adversaries of the lattice mask unmask a block, with the true secret and with a wrong one.


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


def _claim_nothing(view: View, model: PublicModel, opened: Opened | None = None) -> list[Claim]:
    """Claims nothing, because no recording holds a secret, or what a tenant released."""
    return []


LEAKED_SECRET = Adversary(
    "leaked-secret",
    "the unmasking maths alone, for its control: no view holds a secret to use it on",
    _claim_nothing,
)


# ---- released-values ------------------------------------------------------------------------------------------------
#
# Implements `released-values`, which recovers the secret of a lattice mask from results that the tenant releases, such
# as logits.
#
# A client of the tenant's endpoint and the provider work together. The client knows the prompts that it sent, and so
# their encoded rows x̃. The provider received the masked rows z = x̃ + A·s + e mod 2^32, with the public matrix A, the
# secret s and the error e. The tenant released the results y = (x̃ + e)·W̃ of a layer, with the public integer weight
# W̃ and y in units of this integer product. If there are as many results as features, least squares on y − x̃·W̃ give
# e. Then z − x̃ − e = A·s mod 2^32 holds exactly, and linear algebra gives s, as in `no-error`. With s, the provider
# unmasks all rows under the same secret, also those of other clients, up to their errors. If results are rounded, or
# only a few are released for each row, least squares do not give e.
#
# No recording holds released results, so this adversary claims nothing on a recording, and that says nothing about the
# mask. This adversary is in the catalogue because of its control. Source: docs/threat-model.md, "What would break it,
# and what stops that".


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


RELEASED_VALUES = Adversary(
    "released-values",
    "logits given to who knows the prompt, for its control: no view holds released numbers",
    _claim_nothing,
)
