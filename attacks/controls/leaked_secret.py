"""Runs the function `open_block` of `leaked-secret` on a mask with the default lattice parameters. The function gets
the block's secret, and must recover the rows up to the lattice error."""

from __future__ import annotations

import torch

from attacks.adversaries.leaked_secret import ADVERSARY, open_block
from attacks.adversaries.ring_lwe import PublicMatrix
from attacks.controls.control import ControlResult
from attacks.controls.lattice_traffic import Traffic
from noise import sampling
from noise.params import PARAMETERS

NUM_ROWS = 64


def control() -> ControlResult:
    """Computes the relative error of a block's first rows. The adversary wins if the lattice error alone can cause this
    error."""
    parameters = PARAMETERS["default"]
    traffic = Traffic(parameters, 32)
    rows, mask = traffic.activations(NUM_ROWS), traffic.block()[:NUM_ROWS]
    traffic.send(rows, mask)
    public = PublicMatrix(traffic.matrix.to(torch.int64), parameters.ring_degree)
    opened = open_block(traffic.exchanges[-1].request, public, traffic.secrets[0])
    error = float((opened - rows).to(torch.float64).norm() / rows.to(torch.float64).norm())
    needed = sampling.error_bound(parameters) * rows.numel() ** 0.5 / float(rows.to(torch.float64).norm())
    setting = "lattice mask 3x512 (default), the block's secret given"
    return ControlResult(ADVERSARY.name, setting, "relative error of the unmasked rows", error, needed, True)
