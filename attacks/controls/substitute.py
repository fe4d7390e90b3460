"""Runs `substitute` on unmasked rows of unknown scale, as in ring arithmetic. The adversary recovers ΔW to two
digits."""

from __future__ import annotations

import tempfile
from pathlib import Path

from attacks.adversaries import substitute
from attacks.controls import adapted_traffic
from attacks.controls.control import ControlResult
from attacks.seen.adversary import StolenDelta

_TRAINED_TOGETHER = ("q_proj", "k_proj")
"""The traffic determines only the product of these two layers, so they are not judged one by one."""


def control() -> ControlResult:
    """Computes the largest relative error of ΔW over v, o, gate, up and down of both blocks, except the last down_proj.

    In ten runs with different adapters and prompts the error was 0.0012 to 0.0038. In runs with known scales of the
    rows it was 0.0019 to 0.0052.
    """
    with tempfile.TemporaryDirectory() as scratch:
        traffic = adapted_traffic.make(Path(scratch))
        claims = substitute.ADVERSARY.attack(traffic.view, traffic.public, adapted_traffic.scaled(traffic.view))
    got = {claim.layer: claim.delta for claim in claims if isinstance(claim, StolenDelta)}
    wanted = {layer: delta for layer, delta in traffic.deltas.items() if not layer.endswith(_TRAINED_TOGETHER)}
    del wanted["model.layers.1.mlp.down_proj"]  # its output goes to a head that the tenant keeps
    worst = max(
        float((got[layer] - delta).norm() / delta.norm()) if layer in got else 1.0 for layer, delta in wanted.items()
    )
    return ControlResult(
        "substitute", "no mask, hidden row scales", "largest relative error", worst, 0.05, smaller_wins=True
    )
