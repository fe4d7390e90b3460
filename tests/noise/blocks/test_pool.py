"""Tests the mask pool: each row goes to one caller, rows are refilled within the budget, and all are gone after a close
or in a forked child."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import itertools
import os
import pickle
import random
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from noise.blocks.arena import arena, packed
from noise.blocks.pool import DEFAULT_BYTES, Block, MaskPool, RowCounts, default_bytes
from noise.blocks.row_file import RowFile
from noise.blocks.slots import Slots
from noise.scheme import GroupSpec
from tests.support.threads import in_child
from tests.support.waiting import WAIT_S, end, until
from wire.errors import MaskError, MaskReused, Unavailable
from wire.frame import Direction
from wire.ring.widths import unpacked_effect

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
BLOCK_ROWS = 8
WORKER = "veilbase-masks"


def group(number: int = 0, in_features: int = 3, out_features: int = 5) -> GroupSpec:
    return GroupSpec(number, in_features, out_features, 1.0, 1.0, torch.ones(out_features))


def row_bytes(spec: GroupSpec) -> int:
    return 4 * (spec.in_features + spec.out_features)


class Mill:
    """Makes blocks of masks for a pool. Each row of a mask repeats a number that no other row has. A test may make
    the making fail or wait, with `before`."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.made: list[tuple[int, Direction, int, str]] = []
        self.before: Callable[[], None] = lambda: None
        self.slots: type[Slots] = Slots
        self.lock = threading.Lock()

    def __call__(self, spec: GroupSpec, direction: Direction, num_rows: int) -> Sequence[Block]:
        self.made.append((spec.id, direction, num_rows, threading.current_thread().name))
        self.before()
        return [self.block(spec, direction) for _ in range(-(-num_rows // BLOCK_ROWS))]

    def block(self, spec: GroupSpec, direction: Direction) -> Block:
        request_cols, reply_cols = spec.widths(direction)
        with self.lock:
            rows = torch.tensor([[next(self.numbers)] for _ in range(BLOCK_ROWS)], dtype=torch.int32)
        return Block(rows.repeat(1, request_cols), -rows.repeat(1, reply_cols), self.slots(BLOCK_ROWS))

    def by_worker(self) -> list[int]:
        return [number for number, _, _, thread in self.made if thread == WORKER]


@pytest.fixture
def mill() -> Mill:
    return Mill()


@pytest.fixture(params=["memory", "disk"])
def make_pool(mill: Mill, tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    made: list[MaskPool] = []

    def make(budget_bytes: int = 1 << 20, background: bool = False) -> MaskPool:
        # A block of one group lies in two records, and of several groups in more.
        file = RowFile(tmp_path, budget_bytes, held_bytes=5 * row_bytes(group())) if request.param == "disk" else None
        made.append(MaskPool(mill, BLOCK_ROWS, budget_bytes, background, file=file))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def numbers(taken: tuple[torch.Tensor, torch.Tensor]) -> list[int]:
    """Returns the number of each row, after checking that each mask was handed out with its own effect."""
    mask, effect = taken
    assert bool((mask == mask[:, :1]).all())
    assert torch.equal(effect[:, :1], -mask[:, :1])
    return [int(row[0]) for row in mask]


def wait_until(condition: Callable[[], bool]) -> None:
    until(condition, "the pool's worker")


def ready_rows(pool: MaskPool, number: int = 0, direction: Direction = FORWARD) -> int:
    return pool.ready_rows().get((number, direction), 0)


def workers() -> set[threading.Thread]:
    """Returns the threads that refill pools, of all pools."""
    return {thread for thread in threading.enumerate() if thread.name == WORKER}


# ---- one row, one caller --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("budget_bytes", [0, 40 * BLOCK_ROWS, 1 << 20])
def test_eight_threads_never_share_a_row(make_pool: Any, background: bool, budget_bytes: int) -> None:
    pool: MaskPool = make_pool(budget_bytes, background)
    keys = [(group(0), FORWARD), (group(0), BACKWARD), (group(1, 4, 2), FORWARD)]
    start = threading.Barrier(8)

    def work(seed: int) -> list[int]:
        draw, mine = random.Random(seed), []
        start.wait(WAIT_S)
        for _ in range(60):
            spec, direction = draw.choice(keys)
            wanted = draw.choice([1, 1, 2, 7, 8, 9, 30])
            got = numbers(pool.take(spec, direction, wanted))
            assert len(got) == wanted
            mine += got
        return mine

    with ThreadPoolExecutor(8) as threads:
        taken = [number for mine in threads.map(work, range(8)) for number in mine]
    assert len(taken) > 8 * 60
    assert len(set(taken)) == len(taken)


def test_rows_and_their_effects_over_several_blocks(make_pool: Any) -> None:
    pool: MaskPool = make_pool()
    assert numbers(pool.take(group(), FORWARD, 3)) == [1, 2, 3]
    mask, effect = pool.take(group(), FORWARD, 19)
    assert numbers((mask, effect)) == list(range(4, 23))
    assert (mask.shape, effect.shape) == ((19, 3), (19, 5))
    mask, effect = pool.take(group(), BACKWARD, 1)
    assert (mask.shape, effect.shape) == ((1, 5), (1, 3))


def test_no_rows_cost_nothing(make_pool: Any, mill: Mill) -> None:
    mask, effect = make_pool().take(group(), FORWARD, 0)
    assert (mask.shape, effect.shape) == ((0, 3), (0, 5))
    assert mask.dtype == effect.dtype == torch.int32
    assert mill.made == []


def test_bytes_are_counted_until_a_block_is_used_up(make_pool: Any) -> None:
    pool, spec = make_pool(), group()
    pool.take(spec, FORWARD, 1)
    assert pool.ready_bytes == BLOCK_ROWS * row_bytes(spec)
    pool.take(spec, FORWARD, BLOCK_ROWS - 1)
    assert pool.ready_bytes == 0


def test_rows_are_counted_and_told(make_pool: Any) -> None:
    pool: MaskPool = make_pool(3_000_000)
    assert pool.ready_rows() == {}
    size, where = 4, "in memory only"
    if (file := pool.file) is not None:
        size = 3  # three of eight rows of 0.5 MB were made for the call, and the others are records of one row
        read_ahead = "0 of them in memory (read ahead: at most 0 MB)"
        where = f"encrypted in a file without a name in {file.folder}, {read_ahead}"
    assert pool.describe("pads") == f"0 of 3 MB of pads and effects ready, {where}"
    wide = group(7, 100_000, 25_000)
    pool.take(wide, FORWARD, 3)
    pool.take(group(), BACKWARD, 1)
    assert pool.ready_rows() == {(7, FORWARD): BLOCK_ROWS - 3, (0, BACKWARD): BLOCK_ROWS - 1}
    assert pool.describe("pads") == (
        f"{size} of 3 MB of pads and effects ready, {where}: at least 5 rows in each of 2 groups and directions; "
        "16 rows made, 4 of them used"
    )
    assert pool.row_counts() == RowCounts(made=2 * BLOCK_ROWS, ready=2 * BLOCK_ROWS - 4, burnt=0)
    pool.close()
    assert pool.row_counts() == RowCounts(made=0, ready=0, burnt=0)


def test_rows_taken_for_a_call_that_fails_are_counted_as_burnt(make_pool: Any, mill: Mill) -> None:
    pool, spec = make_pool(), group()
    pool.take(spec, FORWARD, 3)

    def fail() -> None:
        raise Unavailable("no hint")

    mill.before = fail
    with pytest.raises(Unavailable):
        pool.take(spec, FORWARD, BLOCK_ROWS)
    assert pool.row_counts() == RowCounts(made=BLOCK_ROWS, ready=0, burnt=BLOCK_ROWS - 3)
    with pytest.raises(Unavailable):
        pool.take(spec, FORWARD, 1)  # No row was ready, so none is burnt.
    assert pool.row_counts().burnt == BLOCK_ROWS - 3


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_an_error_of_the_maker_is_the_callers_and_the_pool_goes_on(make_pool: Any, mill: Mill) -> None:
    pool: MaskPool = make_pool()

    def fail() -> None:
        raise Unavailable("gone")

    mill.before = fail
    for _ in range(2):  # if the first call left its claim, the second would hang
        with pytest.raises(Unavailable, match="gone"):
            pool.take(group(), FORWARD, 1)
    mill.before = lambda: None
    assert numbers(pool.take(group(), FORWARD, 2)) == [1, 2]


def test_callers_that_wait_for_a_maker_that_fails_are_freed(make_pool: Any, mill: Mill) -> None:
    pool: MaskPool = make_pool()
    go_on = threading.Event()

    def fail() -> None:
        assert go_on.wait(WAIT_S)
        raise Unavailable("gone")

    mill.before = fail

    def work() -> str:
        with pytest.raises(Unavailable) as failure:
            pool.take(group(), FORWARD, 1)
        return str(failure.value)

    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(work) for _ in range(4)]
        go_on.set()
        assert [each.result(WAIT_S) for each in waiting] == ["gone"] * 4


def test_an_error_in_the_worker_comes_up_at_the_next_caller_who_needs_a_row(make_pool: Any, mill: Mill) -> None:
    pool: MaskPool = make_pool(background=True)
    pool.take(group(), FORWARD, 1)
    failed = threading.Event()

    def fail() -> None:
        if threading.current_thread().name == WORKER:
            failed.set()
        raise Unavailable("gone")

    mill.before = fail
    assert numbers(pool.take(group(), FORWARD, BLOCK_ROWS - 2)) == list(range(2, BLOCK_ROWS))
    assert failed.wait(WAIT_S), "the worker was to refill"
    assert numbers(pool.take(group(), FORWARD, 1)) == [BLOCK_ROWS]  # rows that were ready are still valid
    with pytest.raises(Unavailable, match="gone"):
        pool.take(group(), FORWARD, 1)
    mill.before = lambda: None
    assert len(numbers(pool.take(group(), FORWARD, 3))) == 3
    wait_until(lambda: ready_rows(pool) >= BLOCK_ROWS // 2)  # the worker is still alive


# ---- ahead of use ---------------------------------------------------------------------------------------------------


def test_the_worker_refills_in_the_order_of_use(make_pool: Any, mill: Mill) -> None:
    pool: MaskPool = make_pool(background=True)
    specs = [group(number) for number in range(4)]
    for spec in specs:
        pool.prepare(spec, FORWARD, BLOCK_ROWS)
    go_on = threading.Event()
    mill.before = lambda: None if go_on.wait(WAIT_S) else pytest.fail("held too long")
    for number in (2, 0, 3, 1):
        pool.take(specs[number], FORWARD, BLOCK_ROWS - 1)
    go_on.set()
    wait_until(lambda: all(ready_rows(pool, number) > BLOCK_ROWS // 2 for number in range(4)))
    assert mill.by_worker() == [2, 0, 3, 1]


def test_without_a_worker_everything_is_made_on_use(make_pool: Any, mill: Mill) -> None:
    pool: MaskPool = make_pool(background=False)
    for _ in range(3 * BLOCK_ROWS):
        pool.take(group(), FORWARD, 1)
    assert {thread for *_, thread in mill.made} == {threading.current_thread().name}
    assert len(mill.made) == 3


def test_the_worker_keeps_to_the_budget(make_pool: Any, mill: Mill) -> None:
    specs = [group(number) for number in range(6)]
    budget = 3 * BLOCK_ROWS * row_bytes(specs[0])
    pool: MaskPool = make_pool(budget, background=True)
    most = 0

    def look() -> None:
        nonlocal most
        if threading.current_thread().name == WORKER:
            most = max(most, pool.ready_bytes)

    mill.before = look
    for _ in range(20):
        for spec in specs:
            pool.take(spec, FORWARD, BLOCK_ROWS)
    wait_until(lambda: pool.ready_bytes == budget)
    assert most + BLOCK_ROWS * row_bytes(specs[0]) <= budget
    assert len(mill.by_worker()) >= 3


def test_preparing_stops_at_the_budget(make_pool: Any) -> None:
    spec = group()
    pool: MaskPool = make_pool(3 * BLOCK_ROWS * row_bytes(spec))
    pool.prepare(spec, FORWARD, 2 * BLOCK_ROWS)
    assert (ready_rows(pool), pool.ready_bytes) == (2 * BLOCK_ROWS, 2 * BLOCK_ROWS * row_bytes(spec))
    pool.prepare(spec, FORWARD, 2 * BLOCK_ROWS)  # these rows are ready already
    pool.prepare(spec, BACKWARD, BLOCK_ROWS + 1)  # two whole blocks would exceed the budget
    assert pool.ready_bytes == 2 * BLOCK_ROWS * row_bytes(spec)
    pool.prepare(spec, BACKWARD, 1)
    assert pool.ready_bytes == 3 * BLOCK_ROWS * row_bytes(spec)
    numbers(pool.take(spec, BACKWARD, 2 * BLOCK_ROWS))  # exceeds it, since there would be no rows otherwise


def test_a_layer_that_cannot_fit_does_not_keep_the_others_waiting(make_pool: Any, mill: Mill) -> None:
    wide, narrow = group(0, 3, 5000), group(1)
    pool: MaskPool = make_pool(BLOCK_ROWS * row_bytes(narrow), background=True)
    pool.take(wide, FORWARD, BLOCK_ROWS)
    pool.take(narrow, FORWARD, BLOCK_ROWS)
    wait_until(lambda: ready_rows(pool, 1) == BLOCK_ROWS)
    assert mill.by_worker() == [1]


def test_long_calls_do_not_take_the_budget_from_the_other_layers(make_pool: Any, mill: Mill) -> None:
    """Each of four layers could use 10 blocks, and the budget has room for 3 of each. Every layer gets 3, in whichever
    order the layers were used."""
    specs = [group(number) for number in range(4)]
    budget = 4 * 3 * BLOCK_ROWS * row_bytes(specs[0])
    pool: MaskPool = make_pool(budget, background=True)
    for _ in range(3):
        for spec in specs:
            pool.take(spec, FORWARD, 10 * BLOCK_ROWS)
    wait_until(lambda: all(ready_rows(pool, number) == 3 * BLOCK_ROWS for number in range(4)))
    assert pool.ready_bytes == budget


def test_a_prompt_is_not_prepared_for_again_while_tokens_follow(make_pool: Any, mill: Mill) -> None:
    """After a prompt, the worker thread prepares only as many rows as single tokens need. It prepares rows for another
    prompt only after two calls in succession of a prompt's size."""
    pool: MaskPool = make_pool(background=True)
    pool.take(group(), FORWARD, 10 * BLOCK_ROWS)
    for _ in range(3 * BLOCK_ROWS):
        pool.take(group(), FORWARD, 1)
    wait_until(lambda: ready_rows(pool) > BLOCK_ROWS // 2)
    assert {rows for _, _, rows, thread in mill.made if thread == WORKER} == {BLOCK_ROWS}
    for _ in range(2):
        pool.take(group(), FORWARD, 10 * BLOCK_ROWS)
    wait_until(lambda: ready_rows(pool) >= 10 * BLOCK_ROWS)


def test_room_in_the_budget_is_noticed_at_once(make_pool: Any, mill: Mill, monkeypatch: pytest.MonkeyPatch) -> None:
    """When rows are taken and the budget has room again, the worker thread makes new ones at once. In this test its
    waits have no time limit, so it must be notified."""
    first, second = group(0), group(1)
    sleeps = threading.Semaphore(0)

    class Patient(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            if threading.current_thread().name != WORKER:
                return super().wait(timeout)
            sleeps.release()
            return super().wait(None)

    with monkeypatch.context() as patch:
        patch.setattr(threading, "Condition", Patient)
        pool: MaskPool = make_pool(BLOCK_ROWS * row_bytes(first), background=True)
    pool.prepare(first, FORWARD, BLOCK_ROWS)
    pool.take(first, FORWARD, BLOCK_ROWS - 1)
    assert sleeps.acquire(timeout=WAIT_S)
    pool.take(second, FORWARD, BLOCK_ROWS)  # both groups are wanted from now on, and there is no room
    assert sleeps.acquire(timeout=WAIT_S)
    assert mill.by_worker() == []
    pool.take(first, FORWARD, 1)
    wait_until(lambda: ready_rows(pool, 0) == BLOCK_ROWS)


class CuttingMill(Mill):
    """Makes the requested rows as pieces of blocks, as the lattice mask does."""

    pool: MaskPool

    def __call__(self, spec: GroupSpec, direction: Direction, num_rows: int) -> Sequence[Block]:
        self.made.append((spec.id, direction, num_rows, threading.current_thread().name))
        left, blocks = self.pool.rounded(num_rows), list[Block]()
        while left > 0:
            rows = min(left, self.pool.piece_rows)
            whole = self.block(spec, direction)
            blocks.append(Block(whole.mask[:rows].clone(), whole.effect[:rows].clone(), Slots(rows)))
            left -= rows
        return blocks


@pytest.mark.parametrize("prompt_rows", [1, 3, 2 * BLOCK_ROWS + 1])
def test_decode_on_a_model_too_wide_for_the_budget_never_waits(prompt_rows: int) -> None:
    """The budget is too small for one whole block of every layer. The worker thread makes pieces of blocks instead, so
    that every call for a single row finds one ready."""
    mill, layers = CuttingMill(), [group(number, 3 + number, 5) for number in range(5)]
    features = sum(spec.in_features + spec.out_features for spec in layers)
    budget = 4 * features * (BLOCK_ROWS - 1)
    pool = mill.pool = MaskPool(mill, BLOCK_ROWS, budget, least_rows=1, features=features)
    with contextlib.closing(pool):
        assert pool.piece_rows < BLOCK_ROWS
        for spec in layers:
            numbers(pool.take(spec, FORWARD, prompt_rows))
        caller = threading.current_thread().name
        for _ in range(5 * BLOCK_ROWS):
            enough = pool.piece_rows // 2
            wait_until(lambda: all(ready_rows(pool, spec.id) > enough for spec in layers))  # noqa: B023
            assert pool.ready_bytes <= budget
            mill.made.clear()
            for spec in layers:
                numbers(pool.take(spec, FORWARD, 1))
            assert caller not in {thread for *_, thread in mill.made}


@pytest.mark.parametrize(
    ("fitting", "expected"),
    [(2 * BLOCK_ROWS, 8), (BLOCK_ROWS, 8), (7, 3), (6, 3), (5, 2), (4, 2), (3, 2), (0, 2)],
)
def test_how_large_a_piece_is(mill: Mill, fitting: int, expected: int) -> None:
    """Blocks are made whole if the budget holds one for each group, and else in equal pieces. A piece takes about half
    of the budget, which holds `fitting` rows, but has at least `least_rows` rows."""
    pool = MaskPool(mill, BLOCK_ROWS, fitting * row_bytes(group()), background=False, least_rows=2, features=8)
    assert pool.piece_rows == expected
    assert [pool.rounded(rows) for rows in (0, 1, BLOCK_ROWS, BLOCK_ROWS + 1)] == [
        0, expected, BLOCK_ROWS, BLOCK_ROWS + expected,
    ]  # fmt: skip
    whole = MaskPool(mill, BLOCK_ROWS, 0, background=False, features=8)
    assert (whole.piece_rows, whole.rounded(1)) == (BLOCK_ROWS, BLOCK_ROWS)


@pytest.mark.parametrize(
    ("features", "free_bytes", "expected"),
    [
        (250_000, 100 << 30, 256 * 2 * 250_000 * 4),  # enough for the next tokens
        (250_000, 2 << 30, (2 << 30) // 10),  # a tenth of the free memory
        (5_000_000, 100 << 30, DEFAULT_BYTES),  # a wide model
        (250_000, None, 256 * 2 * 250_000 * 4),
        (0, None, DEFAULT_BYTES),
        (250_000, 1 << 20, 64 << 20),
        (16, 100 << 30, 64 << 20),
    ],
)
def test_the_default_budget_follows_model_and_machine(features: int, free_bytes: int | None, expected: int) -> None:
    assert default_bytes(features, free_bytes) == expected


def test_the_default_budget_holds_as_many_rows_with_packed_effects() -> None:
    assert default_bytes(250_000, None, 3) == 256 * (4 + 3) * 250_000


class PackingMill(Mill):
    """Makes effects of three bytes a number, as the lattice mask does."""

    def block(self, spec: GroupSpec, direction: Direction) -> Block:
        whole = super().block(spec, direction)
        return Block(whole.mask, packed(256 * whole.effect), whole.slots)


@pytest.mark.parametrize("waits", ["memory", "disk"])
def test_packed_effects_are_counted_and_handed_out_as_they_are(tmp_path: Path, waits: str) -> None:
    """Rows of one block and of several, from memory and from a file; bytes are those that wait."""
    spec, budget = group(), 8 * BLOCK_ROWS * (4 * 3 + 3 * 5 + 4 * 5 + 3 * 3)
    file = RowFile(tmp_path, budget, held_bytes=100) if waits == "disk" else None
    pool = MaskPool(PackingMill(), BLOCK_ROWS, budget, False, features=8, file=file, effect_bytes=3)
    with contextlib.closing(pool):
        for direction, row in ((FORWARD, 4 * 3 + 3 * 5), (BACKWARD, 4 * 5 + 3 * 3)):
            assert pool.row_bytes(spec, direction) == row
            before = pool.ready_bytes
            pool.prepare(spec, direction, 2 * BLOCK_ROWS)
            assert pool.ready_bytes - before == 2 * BLOCK_ROWS * row
            for num_rows in (0, 1, BLOCK_ROWS + 2):
                mask, effect = pool.take(spec, direction, num_rows)
                assert effect.dtype == torch.uint8
                assert effect.shape == (num_rows, 3 * spec.widths(direction)[1])
                numbers((256 * mask, unpacked_effect(effect)))


def test_steps_of_whole_blocks_are_not_made_in_pieces(mill: Mill) -> None:
    """If a call uses a whole block, the pool makes whole blocks, since each piece costs the work of a whole block."""
    spec = group()
    pool = MaskPool(mill, BLOCK_ROWS, 3 * BLOCK_ROWS * row_bytes(spec) // 2, least_rows=1, features=16)
    with contextlib.closing(pool):
        assert pool.piece_rows < BLOCK_ROWS
        numbers(pool.take(spec, FORWARD, BLOCK_ROWS))
        wait_until(lambda: ready_rows(pool) > 0)  # a piece is made, since the next calls are not known yet
        mill.made.clear()
        for _ in range(4):
            numbers(pool.take(spec, FORWARD, BLOCK_ROWS))
            wait_until(lambda: ready_rows(pool) >= BLOCK_ROWS)
        assert {rows for _, _, rows, thread in mill.made if thread == WORKER} == {BLOCK_ROWS}


def test_little_is_made_ahead_for_steps_of_whole_blocks(mill: Mill) -> None:
    """A step uses every row once, so rows of a few layers ahead suffice. Single tokens may use the whole budget."""
    block = BLOCK_ROWS * row_bytes(group())
    pool = MaskPool(mill, BLOCK_ROWS, 100 * block, features=80, step_bytes=3 * block)
    with contextlib.closing(pool):
        for _ in range(3):
            for number in range(10):
                numbers(pool.take(group(number), FORWARD, BLOCK_ROWS))
                assert pool.ready_bytes <= 3 * block
        wait_until(lambda: pool.ready_bytes == 3 * block)
        assert sum(rows > 0 for rows in pool.ready_rows().values()) == 3
        for _ in range(2):
            for number in range(10):
                numbers(pool.take(group(number), FORWARD, 1))
        wait_until(lambda: min(pool.ready_rows().values()) > BLOCK_ROWS // 2)
        assert pool.ready_bytes > 3 * block


def test_groups_do_not_run_out_in_the_same_step(mill: Mill) -> None:
    """Where the budget has no room for a second block of each, a few groups need one in each step, and not all at once.
    What is left out for that is counted as burnt."""
    pool = MaskPool(mill, BLOCK_ROWS, 11 * BLOCK_ROWS * row_bytes(group()), background=False, features=80)
    with contextlib.closing(pool):
        most, seen = 0, 0
        for step in range(10 * BLOCK_ROWS):
            for number in range(10):
                seen += len(numbers(pool.take(group(number), FORWARD, 1)))
            most, _ = max(most, len(mill.made)) if step else 0, mill.made.clear()
        assert most <= 2
        counts = pool.row_counts()
        assert counts.made == counts.ready + counts.burnt + seen
        assert 0 < counts.burnt < 10 * BLOCK_ROWS


def test_who_trains_and_serves_has_rows_ahead_for_both(mill: Mill) -> None:
    """Rows for single tokens, which may fill the rest of the budget, leave room for those of steps."""
    block = BLOCK_ROWS * row_bytes(group())
    pool = MaskPool(mill, BLOCK_ROWS, 12 * block, features=80, step_bytes=3 * block)
    with contextlib.closing(pool):
        for _ in range(6):
            for number in range(10):
                numbers(pool.take(group(number), FORWARD, 1))
            for number in range(10):
                numbers(pool.take(group(number), BACKWARD, BLOCK_ROWS))
        wait_until(lambda: any(ready_rows(pool, number, BACKWARD) > 0 for number in range(10)))
        mill.made.clear()
        for _ in range(6):
            for number in range(10):
                numbers(pool.take(group(number), FORWARD, 1))
            for number in range(10):
                wait_until(lambda: any(ready_rows(pool, each, BACKWARD) > 0 for each in range(10)))
                numbers(pool.take(group(number), BACKWARD, BLOCK_ROWS))
        by_worker = [thread == WORKER for _, direction, _, thread in mill.made if direction is BACKWARD]
        assert sum(by_worker) > len(by_worker) // 2


@pytest.mark.parametrize("waits", ["memory", "disk"])
@pytest.mark.parametrize("directions", [(FORWARD,), (FORWARD, BACKWARD)])
def test_a_direction_that_is_no_longer_used_gives_its_part_back(
    mill: Mill, directions: Sequence[Direction], waits: str, tmp_path: Path
) -> None:
    """Rows for gradients go, as burnt, once a tenant that has trained only generates. Rows of training stay."""
    spec, rows = group(), 0
    budget = 3 * BLOCK_ROWS * row_bytes(spec) // 2
    file = RowFile(tmp_path, 4 * budget, held_bytes=5 * row_bytes(spec)) if waits == "disk" else None
    pool = MaskPool(mill, BLOCK_ROWS, budget, background=False, least_rows=2, features=8, file=file)
    with contextlib.closing(pool):
        numbers(pool.take(spec, FORWARD, 1))
        numbers(pool.take(spec, BACKWARD, 1))
        assert pool.piece_rows < BLOCK_ROWS
        for _ in range(2000):
            for direction in directions:
                numbers(pool.take(spec, direction, 1))
                rows += 1
        is_left = BACKWARD in directions
        assert (ready_rows(pool, 0, BACKWARD) > 0) == is_left
        assert (pool.piece_rows < BLOCK_ROWS) == is_left
        counts = pool.row_counts()
        assert counts.burnt == (0 if is_left else BLOCK_ROWS - 1)
        assert counts.made == counts.ready + counts.burnt + rows + 2
        assert f"{rows + 2} of them used" in pool.describe("masks")
        numbers(pool.take(spec, BACKWARD, 1))
        assert pool.piece_rows < BLOCK_ROWS


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a priority of its own on Linux only")
def test_the_worker_leaves_the_cores_to_others(mill: Mill) -> None:
    nice: list[tuple[str, int, int]] = []

    def look() -> None:
        thread = threading.current_thread()
        nice.append((thread.name, os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), torch.get_num_threads()))

    mill.before = look
    with contextlib.closing(MaskPool(mill, BLOCK_ROWS)) as pool:
        numbers(pool.take(group(), FORWARD, 1))
        numbers(pool.take(group(), FORWARD, 6))
        wait_until(lambda: len(nice) > 1)
    usual = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert nice[0][:2] == (threading.current_thread().name, usual)
    assert nice[1] == (WORKER, max(os.getpriority(os.PRIO_PROCESS, 0), 10), 1)


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a priority of its own on Linux only")
def test_a_priority_that_the_system_refuses_is_said_once(
    mill: Mill, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    with contextlib.closing(MaskPool(mill, BLOCK_ROWS)) as pool:
        numbers(pool.take(group(), FORWARD, 1))
        for _ in range(3):
            numbers(pool.take(group(), FORWARD, 6))
            wait_until(lambda: bool(caplog.records))
    (line,) = (record.getMessage() for record in caplog.records)
    assert "could not get a low priority (Operation not permitted)" in line


# ---- the end --------------------------------------------------------------------------------------------------------


def test_closing_gives_the_memory_back() -> None:
    """Rows are made in the arena, whose free regions go back to the system at once."""

    def make(group: GroupSpec, direction: Direction, num_rows: int) -> list[Block]:
        blocks = -(-num_rows // 512)
        return [Block(arena().rows(512, 3000), arena().rows(512, 5000), Slots(512)) for _ in range(blocks)]

    arena().trim()
    before = arena().num_bytes
    pool = MaskPool(make, 512, 1 << 30, background=False)
    mask, effect = pool.take(group(0, 3000, 5000), FORWARD, 4000)
    assert arena().num_bytes - before > 100 << 20
    del mask, effect
    pool.close()
    assert arena().num_bytes == before


def test_closing_drops_all_while_the_worker_works(make_pool: Any, mill: Mill) -> None:
    before = workers()
    pool: MaskPool = make_pool(background=True)
    pool.take(group(), FORWARD, 1)
    in_maker, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        in_maker.set()
        assert go_on.wait(WAIT_S)

    mill.before = hold
    pool.take(group(), FORWARD, BLOCK_ROWS - 1)
    assert in_maker.wait(WAIT_S)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pool.take, group(), FORWARD, 1)
        pool.close()
        with pytest.raises(MaskError, match="closed"):
            waiting.result(WAIT_S)
    (worker,) = workers() - before
    go_on.set()
    end(worker)
    assert (pool.ready_bytes, pool.ready_rows()) == (0, {}), "what the worker was making must not be kept"
    for use in (lambda: pool.take(group(), FORWARD, 1), lambda: pool.prepare(group(), FORWARD, 1)):
        with pytest.raises(MaskError, match="closed"):
            use()
    pool.close()


def test_a_forgotten_pool_ends_its_worker(mill: Mill) -> None:
    before = workers()
    pool = MaskPool(mill, BLOCK_ROWS)
    pool.take(group(), FORWARD, BLOCK_ROWS)
    (worker,) = workers() - before
    del pool
    gc.collect()
    end(worker)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("held", [False, True])
def test_a_forked_child_gets_nothing_and_the_parent_goes_on(make_pool: Any, mill: Mill, held: bool) -> None:
    """A forked child gets an error instead of masks, and does not hang if another thread of its parent held the pool's
    lock during the fork. The parent's pool still works."""
    pool: MaskPool = make_pool(background=True)
    assert numbers(pool.take(group(), FORWARD, 3)) == [1, 2, 3]
    holding, go_on = threading.Event(), threading.Event()

    class Holding(Slots):
        """Takes rows while the pool's lock is held."""

        def take_up_to(self, num_rows: int) -> range:
            holding.set()
            go_on.wait(WAIT_S)
            return super().take_up_to(num_rows)

    def hold() -> None:
        mill.slots = Holding
        pool.take(group(1), FORWARD, 1)

    def child() -> str:
        said = [f"{len(pool.ready_rows())} shelves, {pool.ready_bytes} bytes"]
        for use in (lambda: pool.take(group(), FORWARD, 1), lambda: pool.prepare(group(), FORWARD, 50)):
            try:
                use()
                said.append("no error")
            except MaskReused:
                said.append("refused")
        pool.close()
        return ", ".join([*said, "closed"])

    with ThreadPoolExecutor(1) as threads:
        if held:
            threads.submit(hold)
            assert holding.wait(WAIT_S)
        answer = in_child(child)
        go_on.set()
    assert answer == "0 shelves, 0 bytes, refused, refused, closed"
    assert numbers(pool.take(group(), FORWARD, 3)) == [4, 5, 6]


def test_nothing_can_be_pickled_copied_or_printed(make_pool: Any, mill: Mill) -> None:
    pool: MaskPool = make_pool()
    pool.take(group(), FORWARD, 1)
    block = mill.block(group(), FORWARD)
    for secret in (pool, block):
        for duplicate in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError):
                duplicate(secret)
        assert "tensor" not in repr(secret)
        assert len(repr(secret)) < 100
