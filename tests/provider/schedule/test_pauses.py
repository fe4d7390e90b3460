"""Tests which tenants count as pausing between small requests."""

from __future__ import annotations

import pytest

from provider.schedule.decoders import MOST_PAUSES, Pauses

PRODUCT_S = 1e-3


def ask(pauses: Pauses, now_s: float, waits_s: float, pause_s: float, times: int = 50) -> float:
    """Sends `times` requests of one tenant, each `pause_s` after the reply to the one before. Returns the time of the
    last reply."""
    for _ in range(times):
        pauses.arrived("a", now_s, PRODUCT_S)
        pauses.left("a", now_s + waits_s)
        now_s += waits_s + pause_s
    return now_s - pause_s


@pytest.mark.parametrize("waits_s", [1e-4, 1e-3, 0.1])
@pytest.mark.parametrize(
    ("pause_s", "is_flood"), [(0.0, True), (2e-4, True), (3e-4, False), (1e-3, False), (1.0, False)]
)
def test_pauses_count_and_waiting_does_not(waits_s: float, pause_s: float, is_flood: bool) -> None:
    pauses = Pauses()
    ask(pauses, 0.0, waits_s, pause_s)
    assert pauses.is_flood("a") is is_flood


def test_who_always_has_another_one_here_does_not_pause() -> None:
    pauses = Pauses()
    pauses.arrived("a", 0.0, PRODUCT_S)
    for step in range(50):
        pauses.arrived("a", step + 0.5, PRODUCT_S)
        pauses.left("a", step + 1.0)
    assert pauses.is_flood("a")
    assert not pauses.is_flood("b")


def test_one_long_pause_does_not_hide_a_flood_and_many_end_it() -> None:
    pauses = Pauses()
    now_s = ask(pauses, 0.0, 1e-3, 0.0)
    pauses.arrived("a", now_s + 100.0, PRODUCT_S)
    pauses.left("a", now_s + 100.0)
    assert pauses.is_flood("a")
    ask(pauses, now_s + 200.0, 1e-3, 1e-3)
    assert not pauses.is_flood("a")


def test_a_cancelled_request_says_nothing_about_pauses() -> None:
    pauses = Pauses()
    for step in range(50):
        pauses.arrived("a", float(step), PRODUCT_S)
        pauses.left("a", None)
    assert not pauses.is_flood("a")


def test_it_knows_a_bounded_number_of_tenants() -> None:
    pauses = Pauses()
    now_s = ask(pauses, 0.0, 1e-3, 0.0)
    for number in range(MOST_PAUSES - 1):
        pauses.arrived(f"t{number}", now_s, PRODUCT_S)
        pauses.left("nobody", now_s)
    assert pauses.is_flood("a")  # the tenant that sent the longest ago is still known
    pauses.arrived("one more", now_s, PRODUCT_S)
    assert not pauses.is_flood("a")
