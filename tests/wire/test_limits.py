"""Tests the limits that a provider may announce, and deadlines."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from wire.frame import HEADER_BYTES
from wire.limits import CHUNK_BYTES, MAX_DEADLINE_MS, MAX_FRAME_BYTES, Limits, deadline_s


def test_defaults_hold_together() -> None:
    limits = Limits()
    assert limits.max_rows == 65_536
    assert limits.max_tensor_bytes == 64 << 20
    assert limits.max_in_flight_bytes == 256 << 20
    assert limits.max_in_flight_bytes >= 2 * limits.max_tensor_bytes  # a largest request and its reply


@pytest.mark.parametrize(
    ("field", "lowest", "highest"),
    [("max_rows", 1, 1 << 24), ("max_tensor_bytes", 4096, 1 << 32), ("max_in_flight_bytes", 8192, 1 << 36)],
)
def test_bounds(field: str, lowest: int, highest: int) -> None:
    for value in (lowest, highest):
        assert getattr(Limits(**{field: value}), field) == value
    for refused in (lowest - 1, highest + 1, -1, 0, "many", None, 1.5):
        with pytest.raises(ValidationError):
            Limits(**{field: refused})  # type: ignore[arg-type]


def test_extra_and_changed_fields_are_refused() -> None:
    with pytest.raises(ValidationError):
        Limits(max_colums=3)  # type: ignore[call-arg]
    with pytest.raises(ValidationError):
        Limits().max_rows = 1  # type: ignore[misc]


def test_a_chunk_and_its_header_fit_a_message() -> None:
    assert CHUNK_BYTES + HEADER_BYTES <= MAX_FRAME_BYTES
    assert CHUNK_BYTES % 4 == 0


@pytest.mark.parametrize(("num_bytes", "seconds"), [(0, 30.0), (1_000_000, 31.0), (256 << 20, 298.435456)])
def test_deadline_is_half_a_minute_and_a_megabyte_a_second(num_bytes: int, seconds: float) -> None:
    assert deadline_s(num_bytes) == pytest.approx(seconds)


def test_the_default_limits_fit_the_longest_deadline() -> None:
    assert deadline_s(Limits().max_in_flight_bytes) * 1000 < MAX_DEADLINE_MS
