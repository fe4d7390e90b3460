"""Tests that no row of a block is handed out twice, whatever threads do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from noise.blocks.slots import Slots, SlotsExhausted
from tests.support.threads import in_child, switching_every, together
from wire.errors import MaskError, MaskReused


def test_rows_are_handed_out_once_and_in_order() -> None:
    slots = Slots(5)
    assert [list(slots.take(2)), list(slots.take(1)), slots.remaining] == [[0, 1], [2], 2]
    with pytest.raises(SlotsExhausted):
        slots.take(3)
    assert list(slots.take(2)) == [3, 4]  # the refused call used no rows
    with pytest.raises(SlotsExhausted):
        slots.take(1)
    assert list(slots.take(0)) == []


def test_take_up_to_gives_what_is_left() -> None:
    slots = Slots(5)
    assert [list(slots.take_up_to(3)), list(slots.take_up_to(3)), list(slots.take_up_to(3))] == [[0, 1, 2], [3, 4], []]


@pytest.mark.parametrize("num_rows", [-1, 0.5, "1", None])
def test_a_number_that_is_no_count_burns_and_returns_nothing(num_rows: Any) -> None:
    slots = Slots(4)
    slots.take(1)
    for ask in (slots.take, slots.take_up_to):
        with pytest.raises((MaskError, TypeError)):
            ask(num_rows)
    assert list(slots.take(3)) == [1, 2, 3]


@pytest.fixture
def _eager_switching() -> Iterator[None]:
    """Makes threads switch as often as the interpreter can, so that a missing lock shows."""
    with switching_every(1e-7):
        yield


@pytest.mark.usefixtures("_eager_switching")
def test_threads_never_get_the_same_row() -> None:
    slots = Slots(20_000)

    def work() -> list[int]:
        rows: list[int] = []
        while got := slots.take_up_to(3):
            rows += got
        return rows

    parts = together(8, work)
    assert sorted(row for part in parts for row in part) == list(range(20_000))


def refusal(slots: Slots) -> str:
    try:
        return f"got {slots.take(1)}"
    except MaskReused:
        return "refused"


def test_a_child_is_known_by_its_process_id_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """C code may fork without Python's hooks."""
    slots, own = Slots(2), os.getpid()
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: own + 1)
        assert refusal(slots) == "refused"
    assert refusal(slots) == "got range(0, 1)"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_is_known_by_the_fork_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a namespace of its own, a child may have its parent's process id."""
    slots, parent = Slots(2), os.getpid()

    def child() -> str:
        monkeypatch.setattr(os, "getpid", lambda: parent)
        return refusal(slots)

    assert in_child(child) == "refused"
    assert refusal(slots) == "got range(0, 1)"
