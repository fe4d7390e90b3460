"""Runs `no-error` on lattice masks without an error at dimension 32. One zero row reveals the whole block exactly."""

from __future__ import annotations

from attacks.adversaries.no_error import ADVERSARY
from attacks.controls.control import ControlResult
from attacks.controls.lattice_traffic import Traffic, toy


def control() -> ControlResult:
    """Computes the relative error of the unmasked rows of two blocks; each block has one zero row."""
    traffic = Traffic(toy(16, 2, 0.0), 64)
    for zero_row in (0, 5):
        traffic.send_block([zero_row])
    error = traffic.relative_error(traffic.attacked(ADVERSARY.attack))
    setting = "lattice mask 2x16 without its error, one zero row in each block"
    return ControlResult(ADVERSARY.name, setting, "relative error of the unmasked rows", error, 0.0, True)
