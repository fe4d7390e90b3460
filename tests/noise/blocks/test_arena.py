"""Tests the memory of mask rows: it is used again only when nothing refers to it, it goes back to the system, and no
forked child has it."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from noise.blocks import arena as arenas
from noise.blocks.arena import Arena
from tests.support.threads import in_child

ROWS, FEATURES = 512, 576
REGION_BYTES = 32 << 20


@pytest.fixture
def arena() -> Arena:
    return Arena()


def test_rows_are_whole_and_may_be_written_in_place(arena: Arena) -> None:
    with torch.inference_mode():
        rows = arena.rows(ROWS, FEATURES)
    assert (rows.shape, rows.dtype, rows.is_contiguous()) == ((ROWS, FEATURES), torch.int32, True)
    assert rows.data_ptr() % 64 == 0
    rows.fill_(7).add_(1)
    assert bool((rows == 8).all())


def test_memory_is_used_again_when_the_last_reference_is_gone(arena: Arena) -> None:
    rows = arena.rows(ROWS, FEATURES)
    place, part = rows.data_ptr(), rows[3:5, :7].t()
    del rows
    other = arena.rows(ROWS, FEATURES)
    assert other.data_ptr() != place
    del part
    assert arena.rows(ROWS, FEATURES).data_ptr() == place


def test_what_autograd_keeps_is_not_used_again(arena: Arena) -> None:
    rows = arena.rows(ROWS, FEATURES).fill_(3)
    place, weight = rows.data_ptr(), torch.ones(1, requires_grad=True)
    made = weight * rows  # the backward pass needs the rows
    del rows
    assert arena.rows(ROWS, FEATURES).data_ptr() != place
    made.sum().backward()
    assert weight.grad is not None
    assert weight.grad.item() == 3 * ROWS * FEATURES
    del made
    assert arena.rows(ROWS, FEATURES).data_ptr() == place


def test_what_is_free_side_by_side_is_one_part_again(arena: Arena) -> None:
    quarter = REGION_BYTES // 4 // 4
    parts = [arena.rows(1, quarter) for _ in range(4)]
    place = parts[0].data_ptr()
    for index in (1, 3, 0, 2):
        parts[index] = torch.empty(0)
        if index == 0:  # the first two quarters are free
            half = arena.rows(2, quarter)
            assert half.data_ptr() == place
            del half
    assert arena.rows(4, quarter).data_ptr() == place
    assert arena.num_bytes == REGION_BYTES


def test_the_smallest_part_that_is_large_enough_is_taken(arena: Arena) -> None:
    large, wall, small, rest = (arena.rows(each, 1 << 16) for each in (20, 1, 10, 97))
    places = large.data_ptr(), small.data_ptr()
    del large, small
    assert arena.rows(8, 1 << 16).data_ptr() == places[1]
    assert arena.rows(15, 1 << 16).data_ptr() == places[0]
    del wall, rest


def test_memory_goes_back_to_the_system_but_for_one_region(arena: Arena) -> None:
    parts = [arena.rows(1, REGION_BYTES // 4) for _ in range(3)]
    parts.append(arena.rows(1, REGION_BYTES))  # four times as large
    assert arena.num_bytes == 7 * REGION_BYTES
    parts.clear()
    small = arena.rows(ROWS, FEATURES)
    assert arena.num_bytes == REGION_BYTES
    arena.trim()
    assert arena.num_bytes == REGION_BYTES  # a part of it is in use
    del small
    arena.trim()
    assert arena.num_bytes == 0


def test_the_fullest_region_that_has_room_is_used(arena: Arena) -> None:
    """So the other one becomes free as a whole."""
    first = [arena.rows(1, REGION_BYTES // 16) for _ in range(4)]
    second = [arena.rows(1, REGION_BYTES // 16) for _ in range(4)]
    assert arena.num_bytes == 2 * REGION_BYTES
    del first[1:], second[3]
    more = [arena.rows(1, REGION_BYTES // 16)]
    first.clear()
    arena.trim()
    assert arena.num_bytes == REGION_BYTES
    del more


def test_memory_that_the_system_does_not_have_is_one_line(arena: Arena) -> None:
    with pytest.raises(MemoryError, match=r"^no memory for \d+ MB of masks$"):
        arena.rows(1 << 40, 1 << 14)


def test_small_parts_take_no_region(arena: Arena) -> None:
    assert arena.rows(2, 100).shape == (2, 100)
    assert arena.rows(0, 100).shape == (0, 100)
    assert arena.num_bytes == 0


def test_threads_never_share_memory(arena: Arena) -> None:
    failures = []

    def work(number: int) -> None:
        held: list[torch.Tensor] = []
        for turn in range(60):
            rows = arena.rows(64 + 8 * (turn % 9), 300)
            rows.fill_(number * 1000 + turn)
            held.append(rows)
            if len(held) > 4:
                oldest = held.pop(0)
                if not bool((oldest == number * 1000 + turn - 4).all()):
                    failures.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert failures == []


def test_copies_and_joined_rows_are_in_the_arena() -> None:
    parts = [torch.full((rows, 300), rows, dtype=torch.int32) for rows in (100, 200)]
    joined = arenas.joined(parts)
    assert torch.equal(joined, torch.cat(parts))
    place = joined.data_ptr()
    copied = arenas.copied(joined)
    assert torch.equal(copied, joined)
    del joined
    assert arenas.arena().rows(300, 300).data_ptr() == place


def test_a_forked_child_loses_nothing_of_its_own() -> None:
    """The child drops what it has of the parent's, and takes much memory of its own meanwhile."""
    held = [arenas.arena().rows(ROWS, FEATURES).fill_(7)]

    def work() -> str:
        own = [torch.full((1 << 20,), number, dtype=torch.int32) for number in range(60)]
        own.append(arenas.arena().rows(ROWS, FEATURES).fill_(60))
        is_whole = int(held[0][0, 0]) == 7
        held.clear()
        gc.collect()
        return str(is_whole and all(bool((each == number).all()) for number, each in enumerate(own)))

    assert in_child(work) == "True"
    assert bool((held[0] == 7).all())
