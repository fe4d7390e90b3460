"""Tests that the predicted times follow the measured times."""

from __future__ import annotations

import pytest

from provider.schedule.latency import LatencyModel
from wire.frame import Arithmetic, Call, Direction

WIDE, NARROW = (Call(group, Direction.FORWARD, Arithmetic.RING) for group in (0, 1))


def model() -> LatencyModel:
    return LatencyModel(lambda call: 4000 if call == WIDE else 1000)


def test_a_line_through_what_was_seen() -> None:
    latency = model()
    for rows in (1, 10, 200, 1):
        latency.measured(WIDE, rows, 1e-3 + rows * 1e-5)
    assert latency.predict_s(WIDE, 50) == pytest.approx(1.5e-3)
    assert latency.rows_within(WIDE, 3e-3) == 200
    assert latency.rows_within(WIDE, 1e-9) == 1


def test_a_lane_that_was_never_seen_borrows_the_rate_of_others() -> None:
    latency = model()
    assert latency.predict_s(NARROW, 100) > 0
    latency.measured(WIDE, 100, 4e-3)
    assert latency.predict_s(NARROW, 100) == pytest.approx(1e-3)


def test_it_follows_a_machine_that_slows_down() -> None:
    latency = model()
    for factor in (1.0, 2.0):
        for number in range(300):
            rows = 1 + number % 50
            latency.measured(WIDE, rows, factor * (1e-3 + rows * 1e-5))
        assert latency.predict_s(WIDE, 20) == pytest.approx(factor * 1.2e-3, rel=0.02)


def test_a_pause_of_the_machine_is_no_product() -> None:
    latency = model()
    for number in range(100):
        latency.measured(WIDE, 1 + number % 50, 1e-3 + (1 + number % 50) * 1e-5)
    latency.measured(WIDE, 20, 5.0)
    assert latency.predict_s(WIDE, 20) < 1.5e-3


def test_noise_never_makes_a_negative_time() -> None:
    latency = model()
    for rows, seconds in ((1, 5e-3), (100, 1e-3), (50, 1e-4), (2, 4e-3)):
        latency.measured(WIDE, rows, seconds)
    for rows in (1, 10, 1000):
        assert latency.predict_s(WIDE, rows) > 0
        assert latency.rows_within(WIDE, 1e-3) >= 1
