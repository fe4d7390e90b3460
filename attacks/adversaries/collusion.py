"""Implements `collusion`, in which the two providers of the mask `shares` combine what they received and recover the
rows.

One provider received x̃ − expand(p) mod 2^32. Here x̃ are the encoded rows, and expand(p) are the pseudorandom numbers
that a seed p of 32 bytes gives. The other provider received p. The first message plus expand(p) is exactly x̃. The mask
`shares` is secure only if the two providers do not collude, and this file shows what happens if they do. A view (what
one provider sees) holds either numbers that look uniform, or seeds. So this adversary claims nothing on a single view.
Its silence says nothing about the mask.

Source: docs/masks.md, "shares"; wire/SPEC.md, section 5, for expand.
"""

from __future__ import annotations

from collections import defaultdict, deque

import torch

from attacks.seen.adversary import Adversary, Claim, StolenRows
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import PublicModel
from attacks.seen.view import Message, View
from wire.errors import ConfigurationError
from wire.ring.seeded_rows import SeededRows

_Key = tuple[int, str, int]
"""The key of a call, which both providers see: (group, direction, number of rows)."""


def collude(view_1: View, view_2: View) -> list[StolenRows]:
    """Recovers the encoded rows x̃ of each message of the first view whose seed is in the second view. Each claim
    carries the message's number in the first view.

    Among the calls of one group, direction and number of rows, the n-th seed is matched with the n-th message. This is
    correct if there is one stream of calls, such as one tenant at a time.

    Args:
        view_1: the view of one tenant at the provider that received masked rows.
        view_2: the view of the same tenant at the provider that received seeds.

    Raises:
        ConfigurationError: the two views are of different models.
    """
    if view_1.manifest.groups != view_2.manifest.groups:
        raise ConfigurationError("the two recordings are of different models: their manifests differ")
    seeds: dict[_Key, deque[SeededRows]] = defaultdict(deque)
    for message in view_2.with_tensors().select("hint"):
        seeds[_key(message)].append(message.seeded_rows())
    stolen = []
    for message in view_1.with_tensors().select("product"):
        if message.arithmetic == "ring" and seeds[_key(message)]:
            hidden = message.request()
            share = seeds[_key(message)].popleft().expand(hidden.shape[1])
            stolen.append(StolenRows(message.seq, (hidden + share).to(torch.float64)))  # wraps mod 2^32
    return stolen


def _key(message: Message) -> _Key:
    return message.group, message.direction, message.num_rows


def attack(view: View, model: PublicModel, opened: Opened | None = None) -> list[Claim]:
    """Claims nothing, because the view of one provider alone does not show the rows."""
    return []


ADVERSARY = Adversary(
    "collusion", "both providers of `shares` add what they got; one view alone has nothing to add", attack
)
