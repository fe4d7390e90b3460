"""Runs `shared-error` on lattice masks that reuse an error in two blocks, or in all pieces of a block."""

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
"""These are the number of features, of rows of a prompt, and of rows of a piece of a block. One prompt is sent
repeatedly, and 49 repeated rows of 32 features give the adversary enough equations."""


def traffic(share_blocks: bool, share_pieces: bool, num_blocks: int = 2) -> Traffic:
    """Makes traffic in which the first and the fifth message of each block hold the same prompt. With `share_pieces`,
    the second message of each block also holds this prompt. All other prompts differ. A block has eight pieces, and
    each piece masks one message.

    Args:
        share_blocks: whether all blocks have the same lattice error.
        share_pieces: whether all pieces of a block have the same lattice error.
        num_blocks: the number of blocks.
    """
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
    """Returns the relative error of the claimed differences between each of the messages 1 to 8 and the message eight
    later. A difference that is not claimed counts as a claim of zero."""
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
    """Computes the larger of two relative errors: that of the claimed differences if two blocks share a lattice error,
    and that of the unmasked rows if the pieces of a block share one. The adversary wins with a relative error of up to
    21/ACTIVATION, because 21 is the largest lattice error."""
    blocks = traffic(share_blocks=True, share_pieces=False)
    claims = blocks.attacked(ADVERSARY.attack)
    worst = differences_error(blocks, claims) if StolenFact(SHARED, "1, 9") in claims else 1.0
    pieces = traffic(share_blocks=False, share_pieces=True, num_blocks=1)
    worst = max(worst, pieces.relative_error(pieces.attacked(ADVERSARY.attack)))
    setting = "lattice mask 3x512 (default), one error in two blocks and one in the pieces of a block"
    return ControlResult(ADVERSARY.name, setting, "worst relative error of rows or differences", worst,
                         21 / ACTIVATION, True)  # fmt: skip
