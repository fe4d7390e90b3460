"""Without a mask o_proj, v_proj, gate_proj and up_proj are recovered to four digits and more."""

from __future__ import annotations

import tempfile
from pathlib import Path

from attacks.adversaries import closed_form
from attacks.adversary import StolenDelta
from attacks.controls import adapted_traffic
from attacks.controls.control import ControlResult

TARGETS = ["v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def control() -> ControlResult:
    """Largest relative error over the layers that plain traffic determines: all but the last down_proj."""
    with tempfile.TemporaryDirectory() as scratch:
        traffic = adapted_traffic.make(Path(scratch), targets=TARGETS)
        claims = closed_form.ADVERSARY.attack(traffic.view, traffic.public, None)
    got = {claim.layer: claim.delta for claim in claims if isinstance(claim, StolenDelta)}
    wanted = dict(traffic.deltas)
    del wanted["model.layers.1.mlp.down_proj"]  # what comes after it goes to a head that the tenant keeps
    worst = max(
        float((got[layer] - delta).norm() / delta.norm()) if layer in got else 1.0 for layer, delta in wanted.items()
    )
    return ControlResult("closed-form", "no mask", "largest relative error", worst, 1e-3, smaller_wins=True)
