"""Runs `principal-components` on a few prompts that are sent many times under one strong mask and fresh noise.

The mean of such messages is the mask plus the mean prompt, and the difference of two messages is mostly noise.
Therefore the adversaries `averaging` and `differencing` must fail on this traffic, which
tests/attacks/test_float_masks.py checks.
"""

from __future__ import annotations

import tempfile

import torch

from attacks.adversaries.principal_components import ADVERSARY
from attacks.controls.control import ControlResult
from attacks.controls.known_mask import Traffic, difference_errors, exchange, inputs_of, record

NUM_PROMPTS, NUM_MESSAGES, NUM_TOKENS = 4, 512, 40
MASK_STRENGTH, NOISE_STRENGTH = 30.0, 2.0
GROUP = 4


def traffic_under_one_mask(folder: str) -> Traffic:
    """Makes the traffic of NUM_PROMPTS prompts. Each prompt is sent many times, in random order, and all messages have
    one mask. The fresh noise of each message is twice as strong as the prompts' deviation from their mean."""
    generator = torch.Generator().manual_seed(0x5EED0007)
    prompts = torch.stack([one[GROUP] for one in inputs_of("llama", NUM_PROMPTS, NUM_TOKENS)])
    strength = float((prompts - prompts.mean(0)).pow(2).mean().sqrt())
    mask = MASK_STRENGTH * torch.randn(prompts.shape[1:], generator=generator)
    order = torch.randint(NUM_PROMPTS, (NUM_MESSAGES,), generator=generator).tolist()
    order[:NUM_PROMPTS] = range(NUM_PROMPTS)
    sent = []
    for which in order:
        noise = NOISE_STRENGTH * strength * torch.randn(prompts.shape[1:], generator=generator)
        sent.append((exchange("llama", GROUP, prompts[which] + mask + noise), prompts[which]))
    return record("llama", folder, sent)


def control() -> ControlResult:
    """Computes the largest relative error of the claimed differences between messages of different prompts; 1 without
    a claim."""
    with tempfile.TemporaryDirectory() as folder:
        traffic = traffic_under_one_mask(folder)
        claims = ADVERSARY.attack(traffic.view, traffic.public, None)
        # an error above 1e6 means that both messages hold the same prompt, so there is no difference to find
        errors = [error for error in difference_errors(claims, traffic.truth) if error < 1e6]
    setting = f"{NUM_PROMPTS} prompts in {NUM_MESSAGES} messages, one mask of strength 30, fresh noise of strength 2"
    worst = max(errors, default=1.0)
    return ControlResult(
        ADVERSARY.name, setting, "worst relative error of a difference", worst, 0.25, smaller_wins=True
    )
