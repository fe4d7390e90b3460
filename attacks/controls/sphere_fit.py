"""Runs `sphere-fit` on traffic in which each group has one fixed Gaussian mask, thirty times stronger than the rows."""

from __future__ import annotations

import tempfile

import torch

from attacks.adversaries.sphere_fit import ADVERSARY
from attacks.controls.control import ControlResult
from attacks.controls.known_mask import Traffic, exchange, inputs_of, normed_groups, public_of, record, row_errors
from attacks.seen.public_model import PublicModel

STRENGTH = 30.0


def fixed_mask_traffic(kind: str, folder: str, public: PublicModel, num_prompts: int) -> Traffic:
    """Makes the traffic of prompts of 12 tokens, for the groups (layers that read the same input) whose input is a norm
    layer's output. All rows of a group have the same Gaussian mask row."""
    generator = torch.Generator().manual_seed(0x5EED0002)
    inputs = inputs_of(kind, num_prompts, 12)
    masks = {group: STRENGTH * torch.randn(inputs[0][group].shape[1], generator=generator) for group in inputs[0]}
    groups = normed_groups(public)
    sent = [(exchange(kind, g, rows + masks[g]), rows) for one in inputs for g, rows in one.items() if g in groups]
    return record(kind, folder, sent)


def control(kind: str = "llama") -> ControlResult:
    """Computes the largest relative error of the claimed rows, over four groups whose inputs come from a norm layer."""
    with tempfile.TemporaryDirectory() as folder:
        traffic = fixed_mask_traffic(kind, folder, public_of(kind), 10)
        errors = row_errors(ADVERSARY.attack(traffic.view, traffic.public, None), traffic.truth)
    return ControlResult(
        ADVERSARY.name, "one fixed mask of strength 30 a group, 120 tokens", "worst relative error of a message's rows",
        max(errors.get(seq, 1.0) for seq in traffic.truth), 1e-4, smaller_wins=True,
    )  # fmt: skip
