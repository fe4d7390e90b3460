"""Tests hints that the tenant computes itself: their numbers, and the decision whether to compute or to fetch them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from noise.hints import local
from noise.hints.local import Choice, Work
from tests.support.lattice import BACKWARD, FORWARD, Provider, weight_of
from wire.errors import InvalidTensor, Unavailable
from wire.frame import Arithmetic, Call, Direction, Purpose
from wire.limits import Limits
from wire.payload import SeedPayload
from wire.ring.seeded_rows import SeededRows

SEED = bytes(range(32))
SHAPES = [(40, 24), (1, 1), (7, 129), (129, 7), (64, 64), (2050, 3), (3, 2050)]


def never() -> float:
    raise AssertionError("measured, although nothing depended on it")


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_rows_are_those_of_the_provider(shape: tuple[int, int], direction: Direction) -> None:
    provider = Provider([weight_of(*shape)])
    provider.weights[0].view(-1)[0] = -127
    (group,) = provider.groups
    columns, reply_cols = group.widths(direction)
    compute = local.computing(SEED, (group, direction), lambda number: provider.weights[number])
    call = Call(0, direction, Arithmetic.RING, Purpose.HINT)
    for first, count in ((0, 5), (5, 1), (1535, 1)):
        theirs = provider.effect(call, SeedPayload(SeededRows(SEED, first, count), columns), reply_cols).result()
        assert torch.equal(compute(first, count).result(), theirs)


def test_a_weight_is_read_once_for_a_hint_and_only_when_a_row_is_needed() -> None:
    provider, read = Provider([weight_of(4, 6)]), []

    def weight(number: int) -> torch.Tensor:
        read.append(number)
        return provider.weights[number]

    compute = local.computing(SEED, (provider.groups[0], FORWARD), weight)
    replies = [compute(first, 2) for first in (0, 2, 4)]
    assert read == []
    for reply in replies:
        reply.result()
    assert read == [0]


@pytest.mark.parametrize("wrong", [weight_of(6, 4), weight_of(4, 6).to(torch.int32)], ids=["shape", "dtype"])
def test_another_weight_is_refused(wrong: torch.Tensor) -> None:
    (group,) = Provider([weight_of(4, 6)]).groups
    with pytest.raises(InvalidTensor, match="int8 weight of shape"):
        local.computing(SEED, (group, FORWARD), lambda _: wrong)(0, 1).result()


def test_work_adds_up_what_is_multiplied_and_what_would_come() -> None:
    groups = Provider([weight_of(40, 24), weight_of(24, 56)]).groups
    pairs = [(group, direction) for group in groups for direction in (FORWARD, BACKWARD)]
    assert Work.of(pairs, 1536) == Work(1536 * 2 * (40 * 24 + 24 * 56), 1536 * 4 * (24 + 40 + 56 + 24))


LARGE = Work(products=10**12, num_bytes=10**9)


@pytest.mark.parametrize(
    ("work", "stored", "speeds", "expected"),
    [
        (LARGE, (True, False), None, Choice(True, "computed here, as those that are stored already")),
        (LARGE, (True, True), None, Choice(True, "computed here, as those that are stored already")),
        (LARGE, (False, True), None, Choice(False, "fetched from the provider, as those that are stored already")),
        (Work(1, local.SMALL_BYTES - 1), (False, False), None, Choice(True, "computed here, since they are small")),
        (LARGE, (False, False), (1e10, 1e6), Choice(
            True, "computed here: 100 s are estimated, against 17 min to fetch 1,000 MB")),
        (LARGE, (False, False), (1e10, 1e9), Choice(
            False, "fetched from the provider: 1.0 s to fetch 1,000 MB are estimated, against 100 s to compute them "
            "here")),
        (LARGE, (False, False), (1e10, 2e7), Choice(
            True, "computed here: 100 s are estimated, against 50 s to fetch 1,000 MB, which is more than half of that"
        )),
        (LARGE, (False, False), (1e10, 2.1e7), Choice(
            False, "fetched from the provider: 48 s to fetch 1,000 MB are estimated, against 100 s to compute them "
            "here")),
    ],
)  # fmt: skip
def test_what_takes_less_time_is_chosen(
    work: Work, stored: tuple[bool, bool], speeds: tuple[float, float] | None, expected: Choice
) -> None:
    product, link = (never, never) if speeds is None else (lambda: speeds[0], lambda: speeds[1])
    assert local.choose(work, *stored, product, link) == expected


def clock_of(durations: list[float]) -> Any:
    """Returns a clock that is asked at the start and at the end of each try, which take these seconds."""
    times = iter([time for index, took in enumerate(durations) for time in (100.0 * index, 100.0 * index + took)])
    return lambda: next(times)


@pytest.mark.parametrize("outlier_s", [0.001, 50.0])
@pytest.mark.parametrize("index", range(5))
def test_the_speed_of_products_does_not_follow_an_outlier(outlier_s: float, index: int) -> None:
    durations = [0.5] * 5
    durations[index] = outlier_s
    assert local.product_speed(clock_of(durations)) == 256 * 1024**2 / 0.5
    assert local.product_speed() > 1e6


def test_quick_products_are_timed_more_often() -> None:
    durations = [0.125, 0.125, 0.0625, 0.0625, 0.0625, 0.0625, 9.0]
    assert local.product_speed(clock_of(durations)) == 256 * 1024**2 / 0.0625


class Link:
    """Answers for a provider, and moves a clock: each request of a round comes a while after the one before."""

    def __init__(self, provider: Provider, *, delay_s: float, row_s: float, extra_s: dict[int, float]) -> None:
        """Takes the seconds until a first reply, those that each row adds, and more seconds of single requests, by
        number."""
        self.now_s, self.sent, self.answered = 0.0, 0, 0
        self.provider, self.delay_s, self.row_s, self.extra_s = provider, delay_s, row_s, extra_s

    def clock(self) -> float:
        return self.now_s

    def path(self, *given: Any) -> Any:
        is_first = self.sent == self.answered
        number, reply, link = self.sent, self.provider.effect(*given), self
        self.sent += 1

        class Slow:
            def result(self) -> torch.Tensor:
                rows = reply.result()
                link.answered += 1
                link.now_s += link.row_s * len(rows) + is_first * link.delay_s + link.extra_s.get(number, 0.0)
                return rows

        return Slow()


ROUND = 5
"""The requests of a round: that for a row, and the parts."""


def speed_of(link: Link, num_bytes: int = 1) -> float:
    (group,) = link.provider.groups
    return local.link_speed((group, FORWARD), num_bytes, link.path, Limits(), link.clock)


def test_the_links_speed_is_without_the_delay_of_a_single_row() -> None:
    provider = Provider([weight_of(8, 1024)])
    link = Link(provider, delay_s=0.5, row_s=2.0**-10, extra_s={})
    assert speed_of(link) == pytest.approx(4096 * 2**10, rel=0.01)
    seeds = {rows.seed for _, rows in provider.hints}
    assert len(seeds) == 1
    asked = [index for _, rows in provider.hints for index in range(rows.first_row, rows.first_row + rows.num_rows)]
    assert len(asked) == len(set(asked)), "no row is asked for twice"
    speed_of(link)
    assert len({rows.seed for _, rows in provider.hints}) == 2, "no seed is used twice"


@pytest.mark.parametrize("number", range(5 * ROUND))
@pytest.mark.parametrize("extra_s", [0.5, 100.0])
def test_the_links_speed_does_not_follow_an_outlier(number: int, extra_s: float) -> None:
    """A single row that was late made a link seem ten times as fast as it is, and a part that was late made it slow."""
    link = Link(Provider([weight_of(8, 1024)]), delay_s=0.05, row_s=2.0**-12, extra_s={number: extra_s})
    assert speed_of(link) == pytest.approx(4096 * 2**12, rel=0.1)


def test_a_slow_link_is_measured_by_smaller_rounds() -> None:
    provider = Provider([weight_of(8, 1024)])
    link = Link(provider, delay_s=0.05, row_s=0.05, extra_s={})
    assert speed_of(link) == pytest.approx(4096 / 0.05, rel=0.01)
    rounds = [16, 5, 5, 5, 5]
    assert [rows.num_rows for _, rows in provider.hints] == [each for rows in rounds for each in (1, *[rows] * 4)]


@pytest.mark.parametrize(("num_bytes", "part_rows"), [(0, 128), (8 << 30, 262), (1 << 40, 512)])
def test_the_link_is_measured_by_a_share_of_all_hints(num_bytes: int, part_rows: int) -> None:
    provider = Provider([weight_of(8, 1024)])
    speed_of(Link(provider, delay_s=0.0, row_s=0.0, extra_s={}), num_bytes)
    rounds = [part_rows // 8, part_rows // 8 * 8, *[part_rows] * 3]
    assert [rows.num_rows for _, rows in provider.hints] == [each for rows in rounds for each in (1, *[rows] * 4)]


def test_the_link_is_measured_within_the_providers_limits() -> None:
    provider = Provider([weight_of(40, 24)])
    limits = Limits(max_rows=3, max_tensor_bytes=4096)
    assert local.link_speed((provider.groups[0], FORWARD), 1, provider.effect, limits) > 0
    assert {rows.num_rows for _, rows in provider.hints} == {1, 3}


def test_a_provider_that_does_not_answer_while_the_link_is_measured() -> None:
    provider = Provider([weight_of(40, 24)])

    def gone() -> None:
        raise Unavailable("gone")

    provider.fail = gone
    with pytest.raises(Unavailable):
        local.link_speed((provider.groups[0], FORWARD), 1, provider.effect, Limits())
