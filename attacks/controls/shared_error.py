"""Runs `shared-error` at the default parameters, on blocks and on pieces with one error: repeated rows reveal both."""

from __future__ import annotations

import math

import torch

from attacks.adversaries.shared_error import ADVERSARY, SHARED
from attacks.controls.control import ControlResult
from attacks.controls.lattice_traffic import ACTIVATION, Traffic
from attacks.seen.adversary import Claim, StolenDifference, StolenFact
from noise import sampling
from noise.params import PARAMETERS

NUM_FEATURES, PROMPT, PIECE = 32, 64, 64
"""The numbers of features, of rows of a prompt and of rows of a piece. The prompt is sent repeatedly, and 49 rows of 32
features give enough equations."""


def traffic(share_blocks: bool, share_pieces: bool, num_blocks: int = 2) -> Traffic:
    """Sends one prompt as every fourth message, and different prompts between. A block holds eight messages, one in
    each of its pieces."""
    made = Traffic(PARAMETERS["default"], NUM_FEATURES)
    drawn = sampling.error(sampling.Csprng(), (1, made.parameters.ring_degree, NUM_FEATURES), made.parameters)
    if share_pieces:
        drawn = drawn[:, :PIECE].repeat(1, made.parameters.ring_degree // PIECE, 1)
    if share_blocks or share_pieces:
        made.error = lambda shape: drawn
    prompt = made.activations(PROMPT)
    for _ in range(num_blocks):
        for number, mask in enumerate(made.block().split(PROMPT)):
            again = number % 4 == 0 or (share_pieces and number == 1)
            made.send(prompt if again else made.activations(PROMPT), mask, "forward")
        if share_pieces and not share_blocks:
            drawn = sampling.error(sampling.Csprng(), drawn.shape, made.parameters)[:, :PIECE].repeat(1, 8, 1)
    return made


def differences_error(made: Traffic, claims: list[Claim]) -> float:
    """Returns the relative error of the claims about the second block, messages 9 to 16; 1 if there are none."""
    said = {(claim.seq, claim.other_seq): claim.rows for claim in claims if isinstance(claim, StolenDifference)}
    wrong = total = 0.0
    for seq in range(1, 9):
        one, other = made.truth[seq], made.truth[seq + 8]
        if one is None or other is None:
            continue
        true = (one - other).to(torch.float64)
        wrong += float((said.get((seq, seq + 8), torch.zeros_like(true)) - true).square().sum())
        total += float(true.square().sum())
    return math.sqrt(wrong / total)


def control() -> ControlResult:
    """Computes the worse of two relative errors: of differences of two blocks' rows, and of rows of a block whose
    pieces share an error."""
    blocks = traffic(share_blocks=True, share_pieces=False)
    claims = blocks.attacked(ADVERSARY.attack)
    worst = differences_error(blocks, claims) if StolenFact(SHARED, "1, 9") in claims else 1.0
    pieces = traffic(share_blocks=False, share_pieces=True, num_blocks=1)
    worst = max(worst, pieces.relative_error(pieces.attacked(ADVERSARY.attack)))
    setting = "lattice mask 3x512 (default), one error in two blocks and one in the pieces of a block"
    return ControlResult(ADVERSARY.name, setting, "worst relative error of rows or differences", worst,
                         21 / ACTIVATION, True)  # fmt: skip
