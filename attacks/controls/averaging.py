"""Runs `averaging` on a prompt that is sent 256 times under fresh Gaussian noise as strong as its rows."""

from __future__ import annotations

import tempfile

import torch

from attacks.adversaries.averaging import ADVERSARY
from attacks.controls.control import ControlResult
from attacks.controls.known_mask import exchange, inputs_of, record, row_errors

NUM_REPEATS = 256


def control() -> ControlResult:
    """Computes the largest relative error of the claimed rows; 1 without a claim. The error is not zero, because the
    mean of 256 messages still has 1/16 of the noise."""
    generator = torch.Generator().manual_seed(0x5EED0004)
    rows = inputs_of("llama", 1, 12)[0][4]
    strength = float(rows.pow(2).mean().sqrt())
    noisy = [rows + strength * torch.randn(rows.shape, generator=generator) for _ in range(NUM_REPEATS)]
    with tempfile.TemporaryDirectory() as folder:
        traffic = record("llama", folder, [(exchange("llama", 4, masked), rows) for masked in noisy])
        errors = row_errors(ADVERSARY.attack(traffic.view, traffic.public, None), traffic.truth)
    return ControlResult(
        ADVERSARY.name, "one prompt 256 times, fresh Gaussian noise of strength 1", "relative error of the rows",
        max(errors.values(), default=1.0), 0.07, smaller_wins=True,
    )  # fmt: skip
