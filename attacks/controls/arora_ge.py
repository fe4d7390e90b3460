"""Runs the adversary `tiny-error` on lattice errors that are 0 or 1, at dimension 8. Two rows whose contents are zeros
reveal the secret, and with it all rows under the same secret, up to the errors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attacks.adversaries.arora_ge import ADVERSARY
from attacks.controls.control import ControlResult
from attacks.controls.lattice_traffic import ACTIVATION, Traffic, toy
from noise import sampling


def binary(shape: Sequence[int]) -> torch.Tensor:
    """Draws lattice errors that are 0 or 1, of the given shape."""
    return sampling.centred_binomial(sampling.Csprng(), shape).remainder(2)


def control() -> ControlResult:
    """Computes the relative error of the unmasked rows of three blocks. The lattice errors, which are 0 or 1, alone
    cause about 1.4/ACTIVATION (ACTIVATION: the largest number of a row)."""
    traffic = Traffic(toy(8, 1, 0.0), 64, binary)
    for first in (0, 2, 6):
        traffic.send_block([first, first + 1], 1)
    error = traffic.relative_error(traffic.attacked(ADVERSARY.attack))
    setting = "lattice mask 1x8 with errors 0 or 1, two zero rows in each block"
    return ControlResult(ADVERSARY.name, setting, "relative error of the unmasked rows", error, 2 / ACTIVATION, True)
