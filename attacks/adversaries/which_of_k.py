"""Finds which of K pooled noise vectors masks each message, by a test of norms alone, one layer at a time.

The paper on the scheme argues that an attacker must try K^layers combinations, but this is not so. In each message by
itself, the norms of the rows show which of the K vectors was added. Let z_t be a masked row of d features, n_k a noise
vector, c its strength in this message, and γ and β the norm layer's weight and bias. The right vector satisfies
‖(z_t − c·n_k − β)/γ‖² = d for every row. With LayerNorm, (z_t − c·n_k − β)/γ also has a mean of 0. The test uses only
the norms and means of rows, no correlation. Source: our derivation, against the argument in Symbiosis (Multi-Adapter
Inference and Fine-Tuning), section on privacy.
"""

from __future__ import annotations

from attacks.adversaries.pooled_noise import masked_messages, take_off_normed, usual_sigma
from attacks.seen.adversary import Adversary, Claim, StolenRows
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import PublicModel
from attacks.seen.view import View


def attack(view: View, public: PublicModel, opened: Opened | None) -> list[Claim]:
    """Claims unmasked rows of each forward message of a group whose input a norm layer computes, if the provider has
    computed noise effects (products of noise vectors with the weight) for that group."""
    masked = masked_messages(view, public)
    sigma = usual_sigma(masked)
    return [StolenRows(one.seq, take_off_normed(one, one.norm, sigma)) for one in masked if one.norm is not None]


ADVERSARY = Adversary(
    "which-of-K",
    "pooled noise vectors told apart by the norm of a normed row alone, layer by layer: the rows of normed inputs",
    attack,
)
