"""Recovers rows under pooled noise. The provider has seen every noise vector, so it can subtract the vector that the
tenant added.

The provider has seen the vectors because it computed their effects (their products with the weight) for the tenant. A
masked message is z_t = x_t + c·n_k, with one k and one c = σ·rms(x) for all its rows. If σ is known, each vector gives
its c by ‖Z − c·n‖² = T·d·(c/σ)², with the message Z of T rows z_t and d features. If a norm layer (weight γ, bias β)
made x, the added vector is the one whose removal leaves rows with ‖(x_t − β)/γ‖² = d, which gives σ, too. Otherwise the
attack chooses the vector with the largest correlation, which is the likeliest one for Gaussian rows. If many messages
are single short rows under weak noise, the choice is wrong for a few of them.
Source: our derivation; the scheme is that of Symbiosis (Multi-Adapter Inference and Fine-Tuning), section on privacy.
"""

from __future__ import annotations

import torch

from attacks.adversaries.pooled_noise import Masked, masked_messages, strengths, take_off_normed, usual_sigma
from attacks.seen.adversary import Adversary, Claim, StolenRows
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import PublicModel
from attacks.seen.view import View


def attack(view: View, public: PublicModel, opened: Opened | None) -> list[Claim]:
    """Claims unmasked rows of each message, if the provider has computed noise effects (products of noise vectors with
    the weight) for the message's group and direction; see `Adversary.attack`."""
    masked = masked_messages(view, public)
    sigma = usual_sigma(masked)
    return [StolenRows(one.seq, _unmask(one, sigma)) for one in masked]


def _unmask(one: Masked, sigma: float) -> torch.Tensor:
    """Returns the message's rows minus a noise vector times its strength, for the pair that fits best."""
    if one.norm is not None:
        return take_off_normed(one, one.norm, sigma)
    roots = strengths(one.rows, one.pool, sigma)
    k = int(roots[0].argmin())  # the largest correlation, and the smallest rms of the remainder
    return one.rows - roots[0, k] * one.pool[k]


ADVERSARY = Adversary(
    "known-mask",
    "noise vectors whose effects the provider computed: takes the right one off every message",
    attack,
    opens_masks=True,
)
