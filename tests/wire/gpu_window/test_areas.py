"""Tests how a window's bytes are shared out: areas never overlap, and all bytes come back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.errors import MalformedFrame
from wire.gpu_window.memory import ALIGNMENT, Area, Areas

SIZE = 64 * ALIGNMENT


@given(
    st.lists(st.tuples(st.integers(0, 8 * ALIGNMENT), st.integers(0, 8 * ALIGNMENT), st.integers(0, 9)), max_size=60)
)
def test_areas_never_overlap_and_all_bytes_come_back(steps: list[tuple[int, int, int]]) -> None:
    areas, taken = Areas(SIZE), []
    for row_bytes, reply_bytes, back in steps:
        area = areas.take(row_bytes, reply_bytes)
        if area is not None:
            assert area.rows_at % ALIGNMENT == area.reply_at % ALIGNMENT == 0
            assert area.rows_at + row_bytes <= area.reply_at
            assert area.reply_at + reply_bytes <= area.rows_at + area.num_bytes <= SIZE
            taken.append(area)
        ranges = sorted((one.rows_at, one.rows_at + one.num_bytes) for one in taken if one.num_bytes)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(ranges))
        assert areas.free_bytes == SIZE - sum(one.num_bytes for one in taken)
        if taken and back:
            areas.give_back(taken.pop(back % len(taken)))
    for one in taken:
        areas.give_back(one)
    assert areas.take(SIZE, 0) is not None, "one free range again"


def test_a_window_that_is_full() -> None:
    areas = Areas(SIZE)
    assert areas.take(SIZE, 1) is None
    assert areas.take(SIZE - ALIGNMENT, 1) is not None
    assert areas.take(1, 1) is None


def test_an_area_crosses_as_two_numbers() -> None:
    assert Area.unpack(Area(512, 1 << 40, 77).pack()) == Area(512, 1 << 40)
    for size in (0, 15, 17):
        with pytest.raises(MalformedFrame):
            Area.unpack(bytes(size))
