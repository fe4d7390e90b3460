"""This module computes hints on the tenant's own machine, from the int8 weights that it trusts, and decides whether
that takes less time than fetching them from the provider.

Guarantees: the rows are exactly those that an honest provider returns for the same seed, mod 2^32, since both sides
expand the seed and multiply with the same code (wire/ring). Nothing here depends on what a provider sent, except that
the speed of the link is measured by asking for a small part of a hint, under a seed that is used for nothing else.
Memory: one group's int8 weight, and one range of rows of A and of the hint, at a time.

The rule of the decision, for a session that has weights of its own and does not name a place:

1. Hints that earlier sessions have stored go on being used: where some are stored already, the others come from the
   same place. If some of both kinds are stored, those that were computed here are used.
2. Hints that would take less than `SMALL_BYTES` on the wire are computed here, since measuring would take longer.
3. Otherwise the times are estimated. Here it is the number of multiplications, by the speed of short products of
   random numbers on this machine. For the link it is the bytes of all hints, by the speed at which a few parts of a
   hint came, about a 400th of all hints. Of both speeds several are measured, one after the other, and the median
   counts: on a busy machine one of them is now and then wrong by a factor of ten. Hints are fetched only if that takes
   at most half as long: a short burst flatters a link and a provider that is busy or near its limits (24 s in place of
   an estimated 8 were seen), and bytes cost money where processor seconds of the tenant's own do not. Rounding and
   writing take the same time either way, and are left out. The link to a provider that is both far away and fast seems
   slower than it is, since connections begin slowly.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from noise.hints.store import Fetch
from noise.scheme import EffectPath, GroupSpec, WeightOf
from wire.errors import InvalidTensor
from wire.frame import ITEM_BYTES, Arithmetic, Call, Direction, Purpose
from wire.limits import MIB, Limits
from wire.payload import SeedPayload
from wire.ring.product import product
from wire.ring.seeded_rows import SEED_BYTES, SeededRows

SMALL_BYTES = 16 * MIB
"""Hints below this size are computed without measuring: that is half a second of one core at 1e10 products a second."""
_PROBE_ROWS, _PROBE_FEATURES = 256, 1024
"""The size of the product that is timed, 2.7e8 products. About 10 ms each on one core with AVX2."""
_LEAST_PROBES, _MOST_PROBES, _PROBES_S = 5, 25, 0.5
"""How often it is timed, at least and at most, and the seconds after which the least is enough."""
_LINK_PARTS, _LEAST_PART_BYTES, _MOST_PART_BYTES, _LINK_SHARE = 4, MIB // 2, 2 * MIB, 400
"""How many parts of a hint are asked for together when the link is measured, as when hints are fetched; the bounds of
the size of each; and which share of all hints those of all rounds are together, between these bounds."""
_LEAST_ROUNDS, _MOST_ROUNDS, _ROUNDS_S = 3, 5, 4.0
"""How many rounds measure the link, at least and at most, and the seconds after which the least is enough. The longest
round does not count in these: it may have been held up by something else."""
_ROUND_S, _GROWTH = 1.0, 8
"""The seconds that a round is to take at most, for which it is made smaller than its share; and how many times smaller
the first round is, and how many times larger or smaller than the one before it another one may be."""
_LEAST_SHARE = 0.1
"""The least share of the measured time that counts as the transfer, whatever the time of a single row was."""

_WORTH_FETCHING = 2.0
"""How many times longer computing must take than fetching, both as estimated, for hints to be fetched."""

Pair = tuple[GroupSpec, Direction]


@dataclass(frozen=True)
class Choice:
    """Says where hints come from.

    Attributes:
        is_local: whether the tenant computes them.
        why: where from and why, for the user: one line without a full stop.
    """

    is_local: bool
    why: str


@dataclass(frozen=True)
class Work:
    """Adds up what the hints of some groups and directions take.

    Attributes:
        products: the numbers that are multiplied to compute them.
        num_bytes: what the provider would send.
    """

    products: int
    num_bytes: int

    @classmethod
    def of(cls, pairs: Sequence[Pair], dimension: int) -> Work:
        """Adds up groups and directions.

        Args:
            pairs: the groups and directions.
            dimension: rank·N, the rows of a hint.
        """
        widths = [group.widths(direction) for group, direction in pairs]
        return cls(
            dimension * sum(columns * reply_cols for columns, reply_cols in widths),
            dimension * sum(reply_cols for _, reply_cols in widths) * ITEM_BYTES,
        )


def choose(
    work: Work,
    local_stored: bool,
    fetched_stored: bool,
    product_speed: Callable[[], float],
    link_speed: Callable[[], float],
) -> Choice:
    """Decides by the rule at the top of this module.

    Args:
        work: what all hints of the model take.
        local_stored, fetched_stored: whether this session can use hints that are stored, by where they came from.
        product_speed: returns multiplications a second on this machine; called only if it decides.
        link_speed: returns bytes a second from the provider; called only if it decides.
    """
    if local_stored or fetched_stored:
        place = "computed here" if local_stored else "fetched from the provider"
        return Choice(local_stored, f"{place}, as those that are stored already")
    if work.num_bytes < SMALL_BYTES:
        return Choice(True, "computed here, since they are small")
    local_s, fetched_s = work.products / product_speed(), work.num_bytes / link_speed()
    here, there = _duration(local_s), f"{_duration(fetched_s)} to fetch {work.num_bytes / 1e6:,.0f} MB"
    if local_s <= _WORTH_FETCHING * fetched_s:
        rule = ", which is more than half of that" if fetched_s < local_s else ""
        return Choice(True, f"computed here: {here} are estimated, against {there}{rule}")
    return Choice(False, f"fetched from the provider: {there} are estimated, against {here} to compute them here")


def _duration(seconds: float) -> str:
    return f"{seconds:.{1 if seconds < 10 else 0}f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def product_speed(clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns how many products of an int32 and an int8 number this machine adds up in a second, with all of torch's
    threads and under its present load: the median of several tries."""
    rows = SeededRows(os.urandom(SEED_BYTES), 0, _PROBE_ROWS).expand(_PROBE_FEATURES)
    weight = rows.view(torch.int8)[:, :_PROBE_FEATURES].repeat(_PROBE_FEATURES // _PROBE_ROWS, 1).clamp_(min=-127)
    took: list[float] = []
    while len(took) < _LEAST_PROBES or (len(took) < _MOST_PROBES and sum(took) < _PROBES_S):
        began = clock()
        product(rows, weight)
        took.append(clock() - began)
    return _PROBE_ROWS * _PROBE_FEATURES**2 / max(statistics.median(took), 1e-9)


def link_speed(
    pair: Pair, num_bytes: int, path: EffectPath, limits: Limits, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Returns how many bytes of hints come from the provider in a second, its computing and the check of the rows
    included: the median of several rounds. In each, several parts of one hint are asked for at once. From their time
    the least of a single row is taken off, so that a provider far away does not seem slow. Their seed is used for
    nothing else, and the rows are dropped.

    Args:
        pair: the group and direction whose hint is asked for.
        num_bytes: what all hints take.
        path: asks the provider.
        limits: the provider's limits.

    Raises:
        VeilbaseError: the provider did not answer, or a reply failed its check.
    """
    group, direction = pair
    columns, reply_cols = group.widths(direction)
    row_bytes = reply_cols * ITEM_BYTES
    part_bytes = num_bytes // (_LINK_SHARE * _LINK_PARTS * _MOST_ROUNDS)
    part_bytes = min(max(part_bytes, _LEAST_PART_BYTES), _MOST_PART_BYTES)
    most = max(1, min(part_bytes // row_bytes, most_rows(pair, limits)))
    rows = max(1, most // _GROWTH)
    seed, call = os.urandom(SEED_BYTES), Call(group.id, direction, Arithmetic.RING, Purpose.HINT)
    first = 0

    def fetch_s(part_rows: int, num_parts: int) -> float:
        nonlocal first
        parts, began = SeededRows(seed, first, part_rows * num_parts).split(part_rows), clock()
        first += part_rows * num_parts
        for reply in [path(call, SeedPayload(part, columns), reply_cols) for part in parts]:
            reply.result()
        return clock() - began

    one_row_s, rounds = math.inf, list[tuple[float, int]]()
    while len(rounds) < _LEAST_ROUNDS or (
        len(rounds) < _MOST_ROUNDS and sum(took_s for took_s, _ in sorted(rounds)[:-1]) < _ROUNDS_S
    ):
        one_row_s = min(one_row_s, fetch_s(1, 1))
        took_s = fetch_s(rows, _LINK_PARTS)
        rounds.append((took_s, (_LINK_PARTS * rows - 1) * row_bytes))
        fitting = min(max(_ROUND_S / max(took_s - one_row_s, 1e-9), 1 / _GROWTH), _GROWTH)
        rows = max(1, min(int(rows * fitting), most))
    return statistics.median(
        num_bytes / max(took_s - one_row_s, _LEAST_SHARE * took_s, 1e-9) for took_s, num_bytes in rounds
    )


def most_rows(pair: Pair, limits: Limits) -> int:
    """Returns the most rows of a hint that a provider with these limits computes for one request, at least 1."""
    widest = max(pair[0].widths(pair[1])) * ITEM_BYTES
    return max(1, min(limits.max_rows, limits.max_tensor_bytes // widest))


@dataclass(frozen=True)
class _Computed:
    """Stands for rows of a hint that are computed when they are asked for."""

    rows: SeededRows
    columns: int
    weight: Callable[[], torch.Tensor]

    def result(self) -> torch.Tensor:
        return product(self.rows.expand(self.columns), self.weight())


def computing(seed: bytes, pair: Pair, weight_of: WeightOf) -> Fetch:
    """Returns a function like one that fetches the rows of a hint, which computes them instead: rows of A, expanded
    from the seed, times W̃, or its transpose in the backward direction. The weight is read when the first row is needed,
    and kept until the function is dropped.

    Args:
        seed: the seed of A.
        pair: the layer group and direction.
        weight_of: returns W̃ of a group, by its number.
    """
    group, direction = pair

    @functools.cache
    def weight() -> torch.Tensor:
        found = weight_of(group.id)
        if found.dtype != torch.int8 or found.shape != (group.in_features, group.out_features):
            raise InvalidTensor(f"group {group.id} has an int8 weight of shape {group.in_features, group.out_features}")
        return found if direction is Direction.FORWARD else found.t()

    columns, _ = group.widths(direction)
    return lambda first, count: _Computed(SeededRows(seed, first, count), columns, weight)
