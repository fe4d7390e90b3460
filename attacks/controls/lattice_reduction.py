"""Runs `lattice-reduction` at dimension 32 with the shipped σ. LLL unmasks blocks that have one zero row each."""

from __future__ import annotations

from attacks.adversaries.lattice_reduction import ADVERSARY, load_fpylll
from attacks.controls.control import ControlResult
from attacks.controls.lattice_traffic import ACTIVATION, Traffic, toy
from noise.params import NOMINAL_SIGMA


def control() -> ControlResult:
    """Computes the relative error of the unmasked rows of two blocks. The lattice error alone causes about
    σ·√3/ACTIVATION.

    Raises:
        ConfigurationError: fpylll is not installed.
    """
    load_fpylll()
    traffic = Traffic(toy(16, 2, NOMINAL_SIGMA), 64)
    for zero_row in (0, 5):
        traffic.send_block([zero_row])
    error = traffic.relative_error(traffic.attacked(ADVERSARY.attack))
    setting = "lattice mask 2x16 with the true error, one zero row in each block"
    needed = 4 * NOMINAL_SIGMA / ACTIVATION
    return ControlResult(ADVERSARY.name, setting, "relative error of the unmasked rows", error, needed, True)
