"""Runs `slot-reuse` on two messages under the same mask rows. The adversary must recover the difference of their
activations.

In a second run the masks of two messages have the same secret and different errors; the adversary must name both
messages.
"""

from __future__ import annotations

import torch

from attacks.adversaries.slot_reuse import ADVERSARY, SHARED_SECRET
from attacks.controls.control import ControlResult
from attacks.controls.lattice_traffic import Traffic
from attacks.seen.adversary import Claim, StolenDifference, StolenFact
from noise.params import PARAMETERS


def attack_on_a_shared_secret() -> list[Claim]:
    """Returns the claims about traffic in which the masks of messages 2 and 3 have the same secret."""
    traffic = Traffic(PARAMETERS["default"], 32, num_groups=2)
    mask, other = traffic.block(), traffic.block()
    error = torch.randint(-21, 22, (8, 32), generator=torch.Generator().manual_seed(1))
    parts = (other[:8], "forward", 0), (mask[:8], "forward", 0), (mask[:8] + error, "backward", 1), \
        (other[8:16], "forward", 1)  # fmt: skip
    for part, direction, group in parts:
        traffic.send(traffic.activations(8), part, direction, group)
    return traffic.attacked(ADVERSARY.attack)


def control() -> ControlResult:
    """Computes the correlation of the claimed difference of two messages with the true difference; 0 if the adversary
    makes any other claim, or does not name the messages with a shared secret."""
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
    if attack_on_a_shared_secret() != [StolenFact(SHARED_SECRET, "2, 3")]:
        value = 0.0
    setting = "lattice mask 3x512 (default), eight mask rows used twice; a secret used in two layers"
    return ControlResult(ADVERSARY.name, setting, "correlation with the true difference", value, 0.99999, False)
