"""Implements `slot-reuse`: finds two requests under the same mask rows, which differ by their activations alone.

It takes the difference mod 2^32 of every pair of rows of one group and direction. Fresh masks leave it uniform, and one
mask used twice leaves x̃ − x̃′, which is below 2^21 or so. A pair of fresh rows looks reused with probability
(2^25/2^32)^d = 2^-7d at d features. The adversary claims nothing unless this probability, times the number of pairs, is
below 2^-40; at d = 64 and 10,000 rows the product is 2^-423. Requests sent again byte by byte tell nothing, and are
skipped.

All layers share the public matrix and read its first columns. So a secret that is used in two layers, or in both
directions of one, shows in the same way: the rows of two messages agree in as many columns as both have, up to
activations and errors. There are too many rows to compare each with each. Rows are therefore sorted by the high bits of
some columns, which puts most pairs that share a secret next to each other. Such a pair is reported and not used
further: the difference of two layers' inputs is of no more use here than that of the same layer's.

Source: the two-time pad; docs/threat-model.md, "What would break it, and what stops that", first row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from attacks.adversaries.ring_lwe import MODULUS, SMALL, Stream, centred, ring_request, streams
from attacks.seen.adversary import Adversary, Claim, StolenDifference, StolenFact
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import PublicModel
from attacks.seen.view import View

FALSE_POSITIVE_BITS = 40
MOST_NEIGHBOURS = 512
"""The number of rows that are compared with each row, nearest first in the first feature; by chance, 2^-7 of all rows
are near."""
MOST_PAIRS = 1 << 14
"""The most near pairs that are used; in traffic without a mask all pairs are near."""
MOST_CLAIMS = 256
SHARED_ROWS = "messages that share mask rows in other places"
SHARED_SECRET = "messages of different layers or directions that share a secret"  # noqa: S105 - a fact's name
_HIGH_BITS, _KEY_COLUMNS = 7, 8
"""Rows are sorted by the high bits of the first columns: `_HIGH_BITS` bits each of `_KEY_COLUMNS` columns. Numbers that
differ by 2^20 have the same high bits 31 times of 32."""
_MOST_COLUMNS, _NOTHING = 64, 1 << 40
"""Up to `_MOST_COLUMNS` columns are compared between layers; `_NOTHING` stands for a column that a narrower layer
lacks."""


def false_positive_log2(num_rows: int, num_features: int) -> float:
    """Returns log2 of the probability that fresh masks give any pair of rows that looks reused."""
    pairs = max(num_rows * (num_rows - 1) // 2, 1)
    return math.log2(pairs) + num_features * math.log2(2 * SMALL / 2**32)


def attack(view: View, model: PublicModel, opened: Opened | None = None) -> list[Claim]:
    """Claims differences of messages whose masks were the same, and a fact for messages that share other mask rows."""
    claims: list[Claim] = []
    for stream in streams(view) if opened is None else ():
        if false_positive_log2(len(stream.rows), stream.num_features) > -FALSE_POSITIVE_BITS or is_plain(stream.rows):
            continue
        claims += _claims(stream)
        if len(claims) >= MOST_CLAIMS:
            break
    return [*claims[:MOST_CLAIMS], *(shared_secrets(view) if opened is None else ())]


def shared_secrets(view: View) -> list[Claim]:
    """Claims a fact for each pair of groups, or of directions of one, that was found to use one secret."""
    places: dict[tuple[str, int], int] = {}
    heads, owners, messages = [], [], []
    for message in view.with_tensors().products():
        rows = ring_request(message)
        if rows is None or message.arithmetic != "ring":
            continue
        head = rows[:, :_MOST_COLUMNS].to(torch.int64)
        if head.shape[1] < _KEY_COLUMNS or is_plain(head):
            continue
        place = places.setdefault((message.direction, message.group), len(places))
        heads.append(torch.nn.functional.pad(head, (0, _MOST_COLUMNS - head.shape[1]), value=_NOTHING))
        owners.append(torch.full((len(head),), place))
        messages.append(torch.full((len(head),), message.seq))
    if len(places) < 2:
        return []
    rows, owner, seq = torch.cat(heads), torch.cat(owners), torch.cat(messages)
    met: dict[tuple[int, int], tuple[int, int]] = {}
    for one, other in _alike(rows):
        if owner[one] != owner[other] and _shows_sharing(rows[one], rows[other], len(rows)):
            between = sorted((int(owner[one]), int(owner[other])))
            met.setdefault((between[0], between[1]), (int(seq[one]), int(seq[other])))
        if len(met) == MOST_CLAIMS:
            break
    return [StolenFact(SHARED_SECRET, f"{min(pair)}, {max(pair)}") for pair in met.values()]


def _alike(rows: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yields pairs of rows whose first columns have the same high bits; three such rows give two pairs."""
    high = rows[:, :_KEY_COLUMNS].remainder(MODULUS) >> (32 - _HIGH_BITS)
    key = (high << (_HIGH_BITS * torch.arange(_KEY_COLUMNS))).sum(1)
    ordered, order = key.sort()
    for place in (ordered[1:] == ordered[:-1]).nonzero()[:, 0][:MOST_PAIRS].tolist():
        yield int(order[place]), int(order[place + 1])


def _shows_sharing(one: torch.Tensor, other: torch.Tensor, num_rows: int) -> bool:
    there = (one != _NOTHING) & (other != _NOTHING)
    count = int(there.sum())
    if false_positive_log2(num_rows, count) > -FALSE_POSITIVE_BITS:
        return False
    return int(centred(one[there] - other[there]).abs().max()) < SMALL


def is_plain(rows: torch.Tensor) -> bool:
    """Returns whether more than half of the numbers are below 2^28, so that nothing was masked; masks leave an eighth.

    Such rows are all near each other. Comparing them took minutes on a real model, and says nothing about slots (slot:
    one row of a mask).
    """
    return bool((centred(rows).abs() < 1 << 28).double().mean() > 0.5)


def _claims(stream: Stream) -> list[Claim]:
    owner = torch.empty(len(stream.rows), dtype=torch.int64)
    for index, (_, first, stop) in enumerate(stream.spans):
        owner[first:stop] = index
    pairs = near_pairs(stream.rows)
    between = owner[pairs]  # (num_pairs, 2)
    met = {(min(a, b), max(a, b)) for a, b in between.tolist() if a != b}
    return [claim for a, b in sorted(met)[:MOST_CLAIMS] if (claim := _claim(stream, a, b)) is not None]


def _claim(stream: Stream, one: int, other: int) -> Claim | None:
    (seq, first, stop), (other_seq, other_first, other_stop) = stream.spans[one], stream.spans[other]
    count = min(stop - first, other_stop - other_first)
    difference = centred(stream.rows[first : first + count] - stream.rows[other_first : other_first + count])
    if not bool(difference.any()):
        return None  # the same bytes
    if int(difference.abs().max()) < SMALL:
        return StolenDifference(seq, other_seq, difference.to(torch.float64))
    return StolenFact(SHARED_ROWS, f"{seq}, {other_seq}")


def near_pairs(rows: torch.Tensor) -> torch.Tensor:
    """Returns pairs of rows that differ by less than `SMALL` in every feature, mod 2^32, but are not equal.

    Args:
        rows: int64, shape (num_rows, features).

    Returns:
        int64, shape (num_pairs, 2).
    """
    order = torch.argsort(rows[:, 0])
    first_column = rows[order, 0]
    found, num_pairs = [torch.empty(0, 2, dtype=torch.int64)], 0
    for step in range(1, min(MOST_NEIGHBOURS, len(rows) - 1) + 1):
        # the sorted rows are compared with those `step` positions on; the last ones wrap, as numbers mod 2^32 do
        near = torch.nonzero(_is_small(first_column - first_column.roll(-step))).flatten()
        if near.numel() == 0:
            break
        pairs = torch.stack((order[near], order[(near + step) % len(rows)]), dim=1)
        for column in range(1, rows.shape[1]):
            pairs = pairs[_is_small(rows[pairs[:, 0], column] - rows[pairs[:, 1], column])]
            if pairs.numel() == 0:
                break
        found.append(pairs[(rows[pairs[:, 0]] != rows[pairs[:, 1]]).any(1)])
        num_pairs += len(found[-1])
        if num_pairs > MOST_PAIRS:
            break
    return torch.cat(found)


def _is_small(difference: torch.Tensor) -> torch.Tensor:
    return centred(difference).abs() < SMALL


ADVERSARY = Adversary(
    "slot-reuse", "one mask slot used twice: small differences mod 2^32; yields differences of activations", attack
)
