"""Recovers differences between messages under one mask that is used again, with fresh noise on top.

Such messages differ only in their contents and in the fresh noise. Messages of one group (layers that read the same
input), direction, arithmetic and number of rows are taken as points. A mask that they all share is part of their mean,
and is removed with the mean. Changes between a few prompts that are repeated, in any order, lie along a few directions;
fresh noise lies along all directions. So the principal components that exceed the noise give the differences between
messages. The adversary claims nothing if no component stands out. This is so under noise that is uniform mod 2^32,
which varies equally in all directions. Source: Gavish and Donoho, "The optimal hard threshold for singular values is
4/√3", 2014, for the threshold if the noise's strength is not known.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from attacks.seen.adversary import Adversary, Claim, StolenDifference
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import PublicModel
from attacks.seen.view import Message, View

_FEW_SETS = 16
_FEW_PAIRS = 8
_FEWEST_MESSAGES = 16
_MOST_MESSAGES = 512
_MOST_NUMBERS = 1 << 24
"""The most numbers in a set of messages: 128 MB in float64."""


def attack(view: View, public: PublicModel, opened: Opened | None) -> list[Claim]:
    """Claims differences between the first messages of a set, for each of the largest sets whose messages vary by more
    than noise. A set holds messages of one group, direction, arithmetic and number of rows."""
    sets: dict[tuple[int, str, str, int], list[Message]] = defaultdict(list)
    for message in view.with_tensors().select("product"):
        if message.num_rows > 0:
            sets[message.group, message.direction, message.arithmetic, message.num_rows].append(message)
    claims: list[Claim] = []
    for messages in sorted(sets.values(), key=len, reverse=True)[:_FEW_SETS]:
        chosen = messages[: min(_MOST_MESSAGES, _MOST_NUMBERS // (messages[0].num_rows * messages[0].widths[0]))]
        claims += _differences(chosen) if len(chosen) >= _FEWEST_MESSAGES else []
    return claims


def _differences(messages: list[Message]) -> list[StolenDifference]:
    first = messages[0].request()
    # int32 wraps mod 2^32, so that a ring mask that all messages share vanishes when the first message is subtracted
    points = torch.stack([(message.request() - first).to(torch.float64).flatten() for message in messages])
    found = components(points) if bool(torch.isfinite(points).all()) else None
    if found is None:
        return []
    shape = (messages[0].num_rows, -1)
    return [
        StolenDifference(messages[place].seq, messages[place + 1].seq, (found[place] - found[place + 1]).view(shape))
        for place in range(0, min(2 * _FEW_PAIRS, len(messages) - 1), 2)
    ]


def components(points: torch.Tensor) -> torch.Tensor | None:
    """Returns the part of the points' variation that is larger than noise alone would cause; None if there is none.

    Args:
        points: float64, shape (num_points, d).

    Returns:
        The points without their mean and without the noise outside of the components; the same shape.
    """
    centred = points - points.mean(0)
    u, values, vt = torch.linalg.svd(centred, full_matrices=False)
    flatness = min(points.shape) / max(points.shape)
    median = float(values[: min(points.shape[0] - 1, len(values))].median())  # centring removes one dimension
    kept = values > (0.56 * flatness**3 - 0.95 * flatness**2 + 1.82 * flatness + 1.43) * median
    if not bool(kept.any()):
        return None
    cleaned: torch.Tensor = (u[:, kept] * values[kept]) @ vt[kept]
    return cleaned


ADVERSARY = Adversary(
    "principal-components",
    "a mask used again, or none, under fresh noise: what messages vary in stands out of it",
    attack,
)
