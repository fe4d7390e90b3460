"""Runs `subspace-projection` on noise that is a thousand times stronger than the rows, but spans 3 of 32 dimensions."""

from __future__ import annotations

import tempfile

import torch

from attacks.adversaries.subspace import ADVERSARY
from attacks.controls.control import ControlResult
from attacks.controls.known_mask import exchange, inputs_of, record
from attacks.seen.adversary import StolenRows

RANK = 3
STRENGTH = 1000.0


def control() -> ControlResult:
    """Computes the cosine of the claimed rows with the part of the true rows that is orthogonal to the noise. Each
    row has fresh noise in the same 3-dimensional subspace."""
    generator = torch.Generator().manual_seed(0x5EED0005)
    inputs = [one[4] for one in inputs_of("llama", 30, 12)]
    span = torch.linalg.qr(torch.randn(inputs[0].shape[1], RANK, generator=generator)).Q
    noise = [STRENGTH * torch.randn(rows.shape[0], RANK, generator=generator) @ span.t() for rows in inputs]
    with tempfile.TemporaryDirectory() as folder:
        sent = [(exchange("llama", 4, rows + mask), rows) for rows, mask in zip(inputs, noise, strict=True)]
        traffic = record("llama", folder, sent)
        claims = ADVERSARY.attack(traffic.view, traffic.public, None)
    stolen = {claim.seq: claim.rows for claim in claims if isinstance(claim, StolenRows)}
    wide = span.to(torch.float64)
    truth = torch.cat([rows - rows @ wide @ wide.t() for rows in traffic.truth.values()])
    guess = torch.cat([stolen.get(seq, torch.zeros_like(rows)) for seq, rows in traffic.truth.items()])
    alike = torch.nn.functional.cosine_similarity(guess.flatten(), truth.flatten(), dim=0)
    return ControlResult(
        ADVERSARY.name, "noise of strength 1000 in 3 of 32 dimensions, 360 rows", "correlation with rows off the span",
        float(alike), 0.99, smaller_wins=False,
    )  # fmt: skip
