"""Runs the functions of `released-values` at the default lattice parameters, on results that are not rounded.

A client of the tenant and the provider work together. The client knows the prompts that it sent and gets their results.
The two must recover the rows of other prompts under the same secret, up to the lattice error.
"""

from __future__ import annotations

import torch

from attacks.adversaries.leaked_secret import open_block
from attacks.adversaries.released_values import ADVERSARY, seek_error, seek_secret
from attacks.adversaries.ring_lwe import PublicMatrix
from attacks.controls.control import ControlResult
from attacks.controls.lattice_traffic import Traffic
from noise import sampling
from noise.params import PARAMETERS, LatticeParameters

NUM_FEATURES, NUM_KNOWN, NUM_OTHERS = 64, 32, 16


def relative_error(parameters: LatticeParameters, step: float, num_given: int = 2 * NUM_FEATURES) -> float:
    """Runs the attack once, and returns the relative error of the rows of prompts that the client does not know; 1 if
    the attack finds no secret.

    Args:
        parameters: the lattice mask's parameters.
        step: results, which are whole numbers, are rounded to multiples of this; 0 leaves them as they are.
        num_given: the number of results that the client gets for each row.
    """
    traffic = Traffic(parameters, NUM_FEATURES)
    rows, mask = traffic.activations(NUM_KNOWN + NUM_OTHERS), traffic.block()[: NUM_KNOWN + NUM_OTHERS]
    sent = rows + mask.to(torch.int64)
    public = PublicMatrix(traffic.matrix.to(torch.int64), parameters.ring_degree)
    own = open_block(sent, public, traffic.secrets[0])  # x̃ + e, as the tenant computes with it
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-127, 128, (NUM_FEATURES, num_given), generator=generator)
    released = (own[:NUM_KNOWN] @ weight).to(torch.float64)
    released = (released / step).round() * step if step else released
    error = seek_error(released, rows[:NUM_KNOWN], weight)
    secret = seek_secret(sent[:NUM_KNOWN], rows[:NUM_KNOWN], error, traffic.seed, parameters.ring_degree)
    others = rows[NUM_KNOWN:].to(torch.float64)
    found = torch.zeros_like(others)
    if secret is not None:
        found = open_block(sent, public, secret)[NUM_KNOWN:].to(torch.float64)
    return float((found - others).norm() / others.norm())


def control() -> ControlResult:
    """Computes the relative error of rows that the client does not know. The adversary wins if the lattice error alone
    can cause this error."""
    parameters = PARAMETERS["default"]
    error = relative_error(parameters, step=0.0)
    # an encoded activation of this traffic is up to 2^17, and half of that on average
    needed = sampling.error_bound(parameters) / (1 << 16)
    setting = "lattice mask 3x512 (default), unrounded results of known prompts"
    return ControlResult(ADVERSARY.name, setting, "relative error of other prompts' rows", error, needed, True)
