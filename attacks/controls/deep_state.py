"""Runs `deep-state inversion` without a mask. The adversary reads prompts from the second block's input alone."""

from __future__ import annotations

import tempfile
from pathlib import Path

from attacks.adversaries import deep_state
from attacks.controls import adapted_traffic
from attacks.controls.control import ControlResult
from attacks.seen.adversary import StolenTokens


def control() -> ControlResult:
    """Computes the share of correct tokens among the tokens that the adversary claims. The adversary does not know the
    adapter. Prompts that it does not try, because of its limit, are not counted."""
    with tempfile.TemporaryDirectory() as scratch:
        traffic = adapted_traffic.make(Path(scratch))
        claims = deep_state.ADVERSARY.attack(traffic.view, traffic.public, None)
    pairs = [
        (one, other)
        for claim in claims
        if isinstance(claim, StolenTokens)
        for one, other in zip(claim.token_ids, traffic.token_ids[claim.prompt], strict=True)
    ]
    right = sum(one == other for one, other in pairs) / max(1, len(pairs))
    return ControlResult("deep-state inversion", "no mask", "recovery rate", right, 0.95, smaller_wins=False)
