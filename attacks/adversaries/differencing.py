"""Computes the difference of two messages. A mask that was used for both cancels in the difference.

The adversary claims the difference z − z' for a few pairs of messages of one group (layers that read the same input)
and direction. If both messages had the same mask, this is the difference x − x' of their contents. In ring arithmetic
the difference is taken mod 2^32 and centred. Source: the two-time pad.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations, islice

import torch

from attacks.seen.adversary import Adversary, Claim, StolenDifference
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import PublicModel
from attacks.seen.view import Message, View

_FEW_GROUPS = 8
_FEW_PAIRS = 8


def attack(view: View, public: PublicModel, opened: Opened | None) -> list[Claim]:
    """Claims the differences of a few pairs of messages in each of the largest sets that `_alike` returns."""
    claims: list[Claim] = []
    for messages in islice(_alike(view), _FEW_GROUPS):
        for one, other in islice(combinations(messages, 2), _FEW_PAIRS):
            difference = one.request() - other.request()  # int32 wraps mod 2^32, and its sign centres the result
            claims.append(StolenDifference(one.seq, other.seq, difference.to(torch.float64)))
    return claims


def _alike(view: View) -> list[list[Message]]:
    """Returns sets of at least two messages that have the same group, direction, arithmetic and number of rows, the
    largest sets first."""
    found: dict[tuple[int, str, str, int], list[Message]] = defaultdict(list)
    for message in view.with_tensors().select("product"):
        if message.num_rows > 0:
            found[message.group, message.direction, message.arithmetic, message.num_rows].append(message)
    return sorted((messages for messages in found.values() if len(messages) > 1), key=len, reverse=True)


ADVERSARY = Adversary(
    "differencing",
    "a mask used for two messages: the difference of their unmasked rows",
    attack,
)
