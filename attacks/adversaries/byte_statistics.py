"""Whether ring messages look uniform: the bytes of a masked message do, those of anything else hardly.

Each of the four bytes of the numbers of one group and direction is compared with the uniform distribution (chi-square,
255 degrees of freedom). A mask that is missing on a group or in a direction, or too narrow, shows here without anything
being known of what it hides. Uniform bytes are no evidence of security: any generator's output passes.
"""

from __future__ import annotations

import torch

from attacks.adversary import Adversary, Claim, StolenFact
from attacks.passes import Opened
from attacks.public_model import PublicModel
from attacks.view import Message, View

_DEVIATIONS = 12.0
"""Standard deviations of chi-square: by chance less than once in 2^60, though its tail is heavier than a normal one."""
_FEWEST = 4096
"""Numbers below which the distribution of chi-square is not yet close to its limit."""
_MOST_MESSAGES = 256
FACT = "groups whose bytes are not uniform"


def deviations(numbers: torch.Tensor) -> float:
    """Largest excess of chi-square over its mean, in standard deviations, of the four bytes of int32 numbers."""
    parts = numbers.contiguous().view(torch.uint8).view(-1, 4)
    worst = 0.0
    for byte in range(4):
        counts = torch.bincount(parts[:, byte].to(torch.int64), minlength=256).to(torch.float64)
        expected = len(parts) / 256
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        worst = max(worst, (chi_square - 255) / (2 * 255) ** 0.5)
    return worst


def _attack(view: View, model: PublicModel, opened: Opened | None) -> list[Claim]:
    streams: dict[tuple[int, str], list[Message]] = {}
    for message in view.with_tensors().select("product"):
        if message.arithmetic == "ring":
            streams.setdefault((message.group, message.direction), []).append(message)
    found = []
    for (group, direction), messages in streams.items():
        step = -(-len(messages) // _MOST_MESSAGES)
        numbers = torch.cat([message.request().flatten() for message in messages[::step]])
        if len(numbers) >= _FEWEST and deviations(numbers) > _DEVIATIONS:
            found.append(f"{group} {direction}")
    return [StolenFact(FACT, ", ".join(found))] if found else []


ADVERSARY = Adversary(
    "byte-statistics", "ring rows that are not uniform: a mask that is missing somewhere, or too narrow", _attack
)
