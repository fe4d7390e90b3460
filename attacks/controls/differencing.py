"""Runs `differencing` on prompts that share one mask, which is Gaussian on float rows and uniform on int32 rows."""

from __future__ import annotations

import tempfile

import torch

from attacks.adversaries.differencing import ADVERSARY
from attacks.controls.control import ControlResult
from attacks.controls.known_mask import difference_errors, exchange, inputs_of, record, to_ring, uniform
from attacks.victim.synthetic import Exchange

NUM_PROMPTS = 3


def control() -> ControlResult:
    """Computes the largest relative error of the claimed differences between two prompts' rows, in float and ring
    arithmetic. The result is 1 if the number of claims is not one for each pair of prompts in each group."""
    generator = torch.Generator().manual_seed(0x5EED0003)
    sent: list[tuple[Exchange, torch.Tensor | None]] = []
    inputs = inputs_of("llama", NUM_PROMPTS, 12)
    for group in inputs[0]:
        shape = inputs[0][group].shape
        noise, pad = torch.randn(shape, generator=generator), uniform(shape, generator)
        for one in inputs:
            if group < 4:
                sent.append((exchange("llama", group, one[group] + noise), one[group]))
            else:
                encoded = to_ring(one[group])
                sent.append((exchange("llama", group, encoded + pad), encoded))
    with tempfile.TemporaryDirectory() as folder:
        traffic = record("llama", folder, sent)
        errors = difference_errors(ADVERSARY.attack(traffic.view, traffic.public, None), traffic.truth)
    complete = len(errors) == len(inputs[0]) * NUM_PROMPTS
    return ControlResult(
        ADVERSARY.name, "one mask used for three prompts, float and ring", "worst relative error of a difference",
        max(errors) if complete else 1.0, 1e-5, smaller_wins=True,
    )  # fmt: skip
