"""Runs `sparse-secret` at the default parameters, on lattice secrets with one to three non-zero trits.

A trit is a coefficient of the secret: -1, 0 or 1.
"""

from __future__ import annotations

import torch

from attacks.adversaries.sparse_secret import ADVERSARY
from attacks.controls.control import ControlResult
from attacks.controls.lattice_traffic import ACTIVATION, Traffic
from noise import sampling
from noise.params import PARAMETERS

NUM_FEATURES, ROWS = 32, 40


def sparse(weight: int) -> torch.Tensor:
    """Draws a secret of the default parameters with `weight` non-zero trits: int8, shape (1, rank, ring_degree)."""
    parameters = PARAMETERS["default"]
    secret = torch.zeros(1, parameters.rank, parameters.ring_degree, dtype=torch.int8)
    rng = sampling.Csprng()
    numbers = rng.random_bytes(4 * weight + 2 * weight).view(torch.int16).to(torch.int64).remainder(1 << 16)
    places = (numbers[:weight] % secret.numel()).tolist()
    for place, sign in zip(places, (numbers[weight : 2 * weight] % 2 * 2 - 1).tolist(), strict=True):
        while int(secret.view(-1)[place]):
            place = (place + 1) % secret.numel()
        secret.view(-1)[place] = sign
    return secret


def traffic(weights: tuple[int, ...]) -> Traffic:
    """Makes one message for each weight, which is the number of non-zero trits of the mask's secret. Weight 0 stands
    for an honest secret."""
    made = Traffic(PARAMETERS["default"], NUM_FEATURES)
    for weight in weights:
        mask = made.block(sparse(weight) if weight else None)
        made.send(made.activations(ROWS), mask[:ROWS], "forward")
    return made


def control() -> ControlResult:
    """Computes the relative error of all unmasked rows. The lattice error alone causes less than 21/ACTIVATION, because
    21 is the largest lattice error."""
    sent = traffic((1, 2, 3, 3))
    error = sent.relative_error(sent.attacked(ADVERSARY.attack))
    setting = "lattice mask 3x512 (default), secrets of one, two and three trits"
    return ControlResult(ADVERSARY.name, setting, "relative error of the unmasked rows", error, 21 / ACTIVATION, True)
