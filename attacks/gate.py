"""What a report must show, so that a build fails when a mask weakens or an adversary forgets how to win.

A private mask's findings lie near their baselines: single 99% intervals are left now and then by chance (a report has
dozens), so the gate is at `_SLACK` half-widths, about 6.4 standard deviations. `off` and `gaussian-pool` must fall.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from attacks.report import Result

PRIVATE_MASKS = ("lattice", "pad", "shares")
METADATA = "traffic-shape"
"""Its facts are not protected by any mask, and DESIGN says so."""
_SLACK = 2.5
_LEAST_ERROR = 0.9
_FALLS = {
    ("off", "float"): ("closed-form", "layer-0 lookup"),
    ("off", "ring"): ("layer-0 lookup",),
    ("gaussian-pool", "float"): ("known-mask + closed-form", "known-mask + layer-0 lookup"),
}
_NEEDED = {"stolen task gain": 0.9, "recovery rate": 0.99}


def weakened(results: Sequence[Result]) -> list[str]:
    """Findings in which a private mask shows more than chance does."""
    return [
        f"{one.mask}: {one.adversary} reaches {one.finding.metric} {one.finding.value:.3g} on {one.finding.module}"
        for one in results
        if one.mask in PRIVATE_MASKS and one.adversary != METADATA and _beats_chance(one)
    ]


def _beats_chance(one: Result) -> bool:
    found = one.finding
    if not math.isfinite(found.value):
        return False
    if found.metric == "relative error":
        return found.value < _LEAST_ERROR
    half = (found.interval[1] - found.interval[0]) / 2
    if half == 0:  # gains and agreements: compared with the base model
        return found.value > found.baseline + 0.1
    return found.value > found.baseline + _SLACK * half


def standing(results: Sequence[Result]) -> list[str]:
    """Adversaries that should have won against what is not private, and did not."""
    lost = []
    for (mask, arithmetic), names in _FALLS.items():
        here = [one for one in results if (one.mask, one.arithmetic) == (mask, arithmetic)]
        for name in names if here else ():
            values = {one.finding.metric: one.finding.value for one in here if one.adversary == name}
            for metric, needed in _NEEDED.items():
                if metric in values and not values[metric] >= needed:
                    lost.append(f"{mask} ({arithmetic}): {name} reaches {metric} {values[metric]:.3g}, not {needed}")
            if not values:
                lost.append(f"{mask} ({arithmetic}): {name} found nothing")
    return lost
