"""Runs `closed-form` without a mask. The adversary recovers the adapter's change of most layers to three digits."""

from __future__ import annotations

import tempfile
from pathlib import Path

from attacks.adversaries import closed_form
from attacks.controls import adapted_traffic
from attacks.controls.control import ControlResult
from attacks.seen.adversary import StolenDelta

TARGETS = ["v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def control() -> ControlResult:
    """Computes the largest relative error of ΔW, in float and in ring arithmetic, over the layers that unmasked traffic
    determines. The error of a layer without a claim is 1.

    The traffic does not determine the last down_proj, whose output goes to a head that the tenant keeps. In ring
    arithmetic it does not determine gate_proj and up_proj of the last block either, because no message shows how large
    the inputs of the last down_proj are.
    """
    worst = max(_error("float"), _error("ring"))
    return ControlResult(
        "closed-form", "no mask, float and ring", "largest relative error", worst, 1e-3, smaller_wins=True
    )


def _error(arithmetic: str) -> float:
    with tempfile.TemporaryDirectory() as scratch:
        traffic = adapted_traffic.make(Path(scratch), targets=TARGETS, arithmetic=arithmetic)
        claims = closed_form.ADVERSARY.attack(traffic.view, traffic.public, None)
    got = {claim.layer: claim.delta for claim in claims if isinstance(claim, StolenDelta)}
    hidden = "model.layers.1.mlp.down_proj" if arithmetic == "float" else "model.layers.1.mlp."
    wanted = {layer: delta for layer, delta in traffic.deltas.items() if not layer.startswith(hidden)}
    return max(
        float((got[layer] - delta).norm() / delta.norm()) if layer in got else 1.0 for layer, delta in wanted.items()
    )
