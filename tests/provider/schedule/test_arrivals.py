"""Tests the predictions of the next decode request: they are learnt from gaps, dropped in time, and bounded in
number."""

from __future__ import annotations

import pytest

from provider.schedule.decoders import MOST_DECODERS, Arrivals
from wire.frame import Arithmetic, Call, Direction

FIRST, SECOND = (Call(group, Direction.FORWARD, Arithmetic.RING) for group in (0, 1))
NEVER = float("inf")
NOBODY = (NEVER, NEVER, 0)


def learnt(gap_s: float, tenant: str = "a", call: Call = FIRST, times: int = 20) -> tuple[Arrivals, float]:
    arrivals, now_s = Arrivals(), 0.0
    for _ in range(times):
        arrivals.replied(tenant, call, now_s)
        now_s += gap_s
        arrivals.arrived(tenant, now_s)
    return arrivals, now_s


def test_nobody_is_expected_at_first() -> None:
    arrivals = Arrivals()
    assert arrivals.next_s(0.0) == NOBODY
    arrivals.arrived("a", 0.0)
    assert arrivals.next_s(0.0) == NOBODY


def test_after_an_unknown_layer_somebody_is_expected_at_any_moment_until_gone() -> None:
    arrivals = Arrivals()
    arrivals.replied("a", FIRST, 1.0)
    assert arrivals.next_s(1.001) == (1.001, 1.05, 1)
    assert arrivals.next_s(1.0501) == NOBODY


def test_a_gap_is_expected_again_and_given_up_when_late() -> None:
    arrivals, now_s = learnt(0.01)
    assert arrivals.next_s(now_s) == NOBODY  # the request has arrived
    arrivals.replied("a", FIRST, now_s)
    expected_s, late_s, number = arrivals.next_s(now_s)
    assert number == 1
    assert now_s + 0.005 < expected_s <= now_s + 0.01
    assert now_s + 0.01 < late_s < now_s + 0.02
    assert arrivals.next_s(now_s + 0.0101)[0] == expected_s
    assert arrivals.next_s(late_s + 1e-6)[0] == late_s + 1e-6  # it is late, so it is expected at any moment
    assert arrivals.next_s(now_s + 0.06) == NOBODY


def test_gaps_are_kept_by_layer_and_follow_a_change() -> None:
    arrivals, now_s = learnt(0.001)
    arrivals.replied("a", SECOND, now_s)
    arrivals.arrived("a", now_s + 0.045)
    arrivals.replied("a", FIRST, 1.0)
    assert arrivals.next_s(1.0)[0] < 1.002
    arrivals.replied("a", SECOND, 2.0)
    assert arrivals.next_s(2.0)[0] > 2.02
    for _ in range(20):
        arrivals.replied("a", FIRST, 3.0)
        arrivals.arrived("a", 3.01)
    arrivals.replied("a", FIRST, 4.0)
    assert arrivals.next_s(4.0)[0] == pytest.approx(4.008, abs=1e-4)


def test_the_first_of_all_tenants_counts() -> None:
    arrivals, now_s = learnt(0.01)
    for _ in range(20):
        arrivals.replied("b", FIRST, now_s)
        arrivals.arrived("b", now_s + 0.002)
    arrivals.replied("a", FIRST, now_s)
    arrivals.replied("b", FIRST, now_s)
    assert arrivals.next_s(now_s)[0] < now_s + 0.0021


def test_a_pause_is_no_gap_and_who_left_is_forgotten() -> None:
    arrivals, now_s = learnt(0.01)
    arrivals.replied("a", FIRST, now_s)
    arrivals.arrived("a", now_s + 10)
    arrivals.replied("a", FIRST, now_s + 10)
    assert arrivals.next_s(now_s + 10)[0] < now_s + 10.011
    assert arrivals.next_s(now_s + 20) == NOBODY
    assert arrivals.next_s(now_s + 10) == NOBODY  # nor if the clock went back


def test_memory_is_bounded() -> None:
    arrivals = Arrivals()
    for number in range(10 * MOST_DECODERS):
        arrivals.replied(f"t{number}", FIRST, 0.0)
    assert arrivals.next_s(0.0)[2] == MOST_DECODERS
