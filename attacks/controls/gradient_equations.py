"""Runs `gradient-equations` on an unmasked training step. The adversary must recover the change of both down_proj
layers."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from attacks.adversaries.gradient_equations import ADVERSARY
from attacks.controls.control import ControlResult
from attacks.controls.gradient_view import Traffic, make
from attacks.seen.adversary import StolenDelta
from attacks.seen.forward_passes import Opened


def errors(traffic: Traffic, opened: Opened | None = None) -> dict[str, float]:
    """Returns the relative error of the claimed change of each down_proj by layer name; 1 if nothing is claimed.

    Args:
        traffic: the training step to attack.
        opened: unmasked rows that the adversary uses in place of the recorded ones; None stands for the recorded ones.
    """
    claims = ADVERSARY.attack(traffic.view, traffic.public, opened)
    got = {claim.layer: claim.delta for claim in claims if isinstance(claim, StolenDelta)}
    found = {}
    for block in traffic.public.blocks:
        wanted = traffic.deltas[block.down.name]
        if block.mlp_norm.bias is not None:  # a LayerNorm removes the mean of every row
            wanted = wanted - wanted.mean(1, keepdim=True)
        delta = got.get(block.down.name, torch.zeros_like(wanted))
        found[block.down.name] = float((delta - wanted).norm() / wanted.norm())
    return found


def control() -> ControlResult:
    """Computes the largest relative error of the claimed changes of down_proj layers, over tiny-llama and tiny-gpt2."""
    worst = 0.0
    for name in ("tiny-llama", "tiny-gpt2"):
        with tempfile.TemporaryDirectory() as folder:
            worst = max(worst, *errors(make(Path(folder), name)).values())
    return ControlResult(
        ADVERSARY.name, "no mask, float, one training step of 12 rows of 8 tokens", "largest relative error of down",
        worst, 1e-3, smaller_wins=True,
    )  # fmt: skip
