"""Runs `layer-0 lookup` without a mask. The adversary must read every token of the prompts."""

from __future__ import annotations

import tempfile
from pathlib import Path

from attacks.adversaries import layer0_lookup
from attacks.controls import adapted_traffic
from attacks.controls.control import ControlResult
from attacks.seen.adversary import StolenTokens


def control() -> ControlResult:
    """Computes the share of tokens that the adversary recovers correctly from unmasked traffic."""
    with tempfile.TemporaryDirectory() as scratch:
        traffic = adapted_traffic.make(Path(scratch))
        claims = layer0_lookup.ADVERSARY.attack(traffic.view, traffic.public, None)
    got = {claim.prompt: claim.token_ids for claim in claims if isinstance(claim, StolenTokens)}
    right = sum(
        one == other
        for prompt, ids in enumerate(traffic.token_ids)
        for one, other in zip(got.get(prompt, ()), ids, strict=False)
    )
    total = sum(map(len, traffic.token_ids))
    return ControlResult("layer-0 lookup", "no mask", "recovery rate", right / total, 1.0, smaller_wins=False)
