"""One slot used twice among honest blocks: the difference of the two activations comes out."""

from __future__ import annotations

import torch

from attacks.adversaries.slot_reuse import ADVERSARY
from attacks.adversary import StolenDifference
from attacks.controls.control import ControlResult
from attacks.controls.lattice_traffic import Traffic
from noise.params import PARAMETERS


def control() -> ControlResult:
    """Correlation of the claimed difference with the true one; 0 where anything else is claimed."""
    traffic = Traffic(PARAMETERS["default"], 32)
    mask, other = traffic.block(), traffic.block()
    for part in (mask[:8], other[:8], mask[:8], mask[8:16]):
        traffic.send(traffic.activations(8), part, "forward")
    claims = traffic.attacked(ADVERSARY.attack)
    value = 0.0
    match claims:
        case [StolenDifference(seq=1, other_seq=3, rows=rows)]:
            one, three = traffic.truth[1], traffic.truth[3]
            if one is not None and three is not None:
                both = torch.stack((rows.flatten(), (one - three).to(torch.float64).flatten()))
                value = float(torch.corrcoef(both)[0, 1])
    setting = "lattice mask 3x512 (default), eight mask rows used twice"
    return ControlResult(ADVERSARY.name, setting, "correlation with the true difference", value, 0.99999, False)
