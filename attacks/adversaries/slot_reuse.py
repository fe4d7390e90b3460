"""Implements `slot-reuse`, which finds two requests that used the same mask rows, and computes the difference of their
inputs.

A masked row is x̃ + m mod 2^32, with x̃ the encoded activations and m a row of the mask. The adversary subtracts rows
of one group (layers that read the same input) and direction from each other. If the mask rows differ, the difference is
uniform mod 2^32. If one mask row was used twice, it cancels and leaves x̃ − x̃′. Since encoded activations are below
2^20 or so, this difference is below 2^21.

The test is generous: a difference counts as small if its magnitude is below 2^24 (`SMALL`), which is a range of 2^25
numbers. So a pair of rows with different mask rows looks like a reuse with probability (2^25/2^32)^d = 2^-7d for d
features. The adversary claims nothing unless this probability, times the number of pairs, is below 2^-40; at d = 64 and
10,000 rows the product is 2^-422. Requests that were sent again byte by byte have a difference of zero, and are
skipped.

All layers share the public matrix A and use its first columns. So a secret s that is used in two layers, or in both
directions of one layer, shows in the same way. The masks A·s of two messages then agree in all columns that both
messages have, up to the masks' errors. There are too many rows to compare all pairs. Rows are therefore sorted by the
high bits of some columns, which puts most pairs that share a secret next to each other. The adversary reports such a
pair as a fact.

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
"""The most rows with which each row is compared; those nearest in the first feature are compared first. By chance, a
share of 2^-7 of all rows is within `SMALL` in that feature."""
MOST_PAIRS = 1 << 14
"""The search for near pairs of rows ends after about this many, because without a mask all pairs are near."""
MOST_CLAIMS = 256
SHARED_ROWS = "messages that share mask rows in other places"
SHARED_SECRET = "messages of different layers or directions that share a secret"  # noqa: S105 - a fact's name
_HIGH_BITS, _KEY_COLUMNS = 7, 8
"""Rows are sorted by the highest `_HIGH_BITS` bits of each of the first `_KEY_COLUMNS` columns. Two numbers that differ
by 2^20 have the same high bits in 31 of 32 cases."""
_MOST_COLUMNS, _NOTHING = 64, 1 << 40
"""Up to `_MOST_COLUMNS` columns are compared between layers. The value `_NOTHING` stands for a column that a narrower
layer does not have."""


def false_positive_log2(num_rows: int, num_features: int) -> float:
    """Returns log2 of an upper bound on the probability that any pair of rows under fresh masks looks like a reuse."""
    pairs = max(num_rows * (num_rows - 1) // 2, 1)
    return math.log2(pairs) + num_features * math.log2(2 * SMALL / 2**32)


def attack(view: View, model: PublicModel, opened: Opened | None = None) -> list[Claim]:
    """Claims the differences of messages that used the same mask rows in the same order. For messages that share mask
    rows at other positions, or that share a secret (`_shared_secrets`), it claims only that they do. If `opened` is
    given, it claims nothing, because it does not use it and has already run without it."""
    claims: list[Claim] = []
    for stream in streams(view) if opened is None else ():
        if false_positive_log2(len(stream.rows), stream.num_features) > -FALSE_POSITIVE_BITS or _is_plain(stream.rows):
            continue
        claims += _claims(stream)
        if len(claims) >= MOST_CLAIMS:
            break
    return [*claims[:MOST_CLAIMS], *(_shared_secrets(view) if opened is None else ())]


def _shared_secrets(view: View) -> list[Claim]:
    """Claims which messages of different groups (layers that read the same input), or of different directions, share a
    secret. Even if two groups or directions share many secrets, only one pair of their messages is claimed."""
    places: dict[tuple[str, int], int] = {}
    heads, owners, messages = [], [], []
    for message in view.with_tensors().products():
        rows = ring_request(message)
        if rows is None or message.arithmetic != "ring":
            continue
        head = rows[:, :_MOST_COLUMNS].to(torch.int64)
        if head.shape[1] < _KEY_COLUMNS or _is_plain(head):
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
    """Yields pairs of rows whose first columns have the same high bits. Only neighbours in sorted order are paired, so
    three such rows give two pairs."""
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


def _is_plain(rows: torch.Tensor) -> bool:
    """Returns whether the rows look unmasked: more than half of their numbers are below 2^28 in magnitude.

    Of masked numbers, an eighth is below 2^28. Unmasked rows are all near each other. Comparing them would take
    minutes on a real model, and would say nothing about reused mask rows.
    """
    return bool((centred(rows).abs() < 1 << 28).double().mean() > 0.5)


def _claims(stream: Stream) -> list[Claim]:
    owner = torch.empty(len(stream.rows), dtype=torch.int64)
    for index, (_, first, stop) in enumerate(stream.spans):
        owner[first:stop] = index
    pairs = _near_pairs(stream.rows)
    between = owner[pairs]  # (num_pairs, 2)
    met = {(min(a, b), max(a, b)) for a, b in between.tolist() if a != b}
    return [claim for a, b in sorted(met)[:MOST_CLAIMS] if (claim := _claim(stream, a, b)) is not None]


def _claim(stream: Stream, one: int, other: int) -> Claim | None:
    (seq, first, stop), (other_seq, other_first, other_stop) = stream.spans[one], stream.spans[other]
    count = min(stop - first, other_stop - other_first)
    difference = centred(stream.rows[first : first + count] - stream.rows[other_first : other_first + count])
    if not bool(difference.any()):
        return None  # The request was sent again byte by byte.
    if int(difference.abs().max()) < SMALL:
        return StolenDifference(seq, other_seq, difference.to(torch.float64))
    return StolenFact(SHARED_ROWS, f"{seq}, {other_seq}")


def _near_pairs(rows: torch.Tensor) -> torch.Tensor:
    """Returns pairs of rows that are not equal but differ by less than `SMALL` in every feature, mod 2^32.

    Each row is compared only with the `MOST_NEIGHBOURS` rows after it in the order of the first feature. The search
    ends once it has found more than `MOST_PAIRS` pairs.

    Args:
        rows: int64, shape (num_rows, features).

    Returns:
        int64, shape (num_pairs, 2).
    """
    order = torch.argsort(rows[:, 0])
    first_column = rows[order, 0]
    found, num_pairs = [torch.empty(0, 2, dtype=torch.int64)], 0
    for step in range(1, min(MOST_NEIGHBOURS, len(rows) - 1) + 1):
        # each sorted row is compared with the row `step` positions later; the order is cyclic, as numbers mod 2^32 are
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


SLOT_REUSE = Adversary(
    "slot-reuse", "one mask slot used twice: small differences mod 2^32; yields differences of activations", attack
)
