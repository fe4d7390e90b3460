"""Tests that two ranks give the results of one process, and that neither rank waits without end, whatever the other one
does."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from provider.engine import products
from provider.parallel.dispatch import Command, Operation
from provider.parallel.ranks import Ranks
from provider.parallel.sharding import ColumnSlices
from tests.support.ranks import Follower, Team
from tests.support.waiting import WAIT_S, comes, end
from wire.errors import ConfigurationError, InvalidTensor, RemoteFault, Unavailable, UnknownLayer
from wire.frame import Arithmetic, Call, Direction, Purpose
from wire.ring.seeded_rows import Rows, SeededRows

pytestmark = pytest.mark.slow

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
RING, FLOAT = Arithmetic.RING, Arithmetic.FLOAT
CALL = Call(0, FORWARD, RING)
HINT = Call(0, BACKWARD, RING, Purpose.HINT)
SHORT_S = 5.0
"""A timeout for which a test waits. On a busy machine it is long enough to load a tiny model."""
LONG_S = 100.0
"""A timeout for which no test may wait."""


@pytest.fixture
def each(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Removes the process group after each test, however the test ended."""
    yield monkeypatch
    if dist.is_initialized():
        dist.destroy_process_group()


def rows_of(team: Team, call: Call, num_rows: int) -> Rows:
    info = team.whole.groups[call.group].info
    cols = info.in_features if call.direction is FORWARD else info.out_features
    if call.purpose is Purpose.HINT:
        return SeededRows(bytes(range(32)), 2**40 - 300, num_rows)
    if call.arithmetic is FLOAT:
        return torch.randn(num_rows, cols)
    return torch.randint(-(2**31), 2**31, (num_rows, cols), dtype=torch.int32)


def calls(team: Team) -> list[Call]:
    """Returns every possible call."""
    served = [purpose for purpose in Purpose if purpose is not Purpose.WEIGHTS]
    pairs = [(RING, purpose) for purpose in served] + [(FLOAT, Purpose.PRODUCT), (FLOAT, Purpose.EFFECT)]
    return [Call(group.info.id, way, *pair) for group in team.whole.groups for way in Direction for pair in pairs]


@pytest.mark.parametrize("parallel", ["tensor", "fsdp"])
@pytest.mark.parametrize(("kind", "weights"), [("llama", "native"), ("gpt2", "int8")])
def test_every_product_is_that_of_one_process(
    follower: Follower, models: dict[str, Path], each: pytest.MonkeyPatch, parallel: str, kind: str, weights: str
) -> None:
    team = follower.join(each, parallel, models[kind], weights)
    assert {group.info.out_features % 2 for group in team.whole.groups} == {0, 1}
    for call in calls(team):
        for num_rows in (0, 1, 5, 300):  # the last number is too large to fit into the command
            rows = rows_of(team, call, num_rows)
            expected = products.compute(team.whole, call, rows)
            reply = team.served_model.compute(call, rows)
            if call.arithmetic is RING:
                assert reply.dtype == torch.int32
                assert torch.equal(reply, expected), (call, num_rows)
            else:
                torch.testing.assert_close(reply, expected, rtol=1e-5, atol=1e-5)
    team.served_model.close()
    assert follower.answer() == "stopped"


def test_threads_that_ask_at_the_same_time_get_their_own(
    follower: Follower, models: dict[str, Path], each: pytest.MonkeyPatch
) -> None:
    """Several threads call at once, and each gets its own product. If the two ranks entered collectives in different
    orders, numbers would be wrong without an error."""
    team = follower.join(each, "tensor", models["llama"], "int8")
    asked = [(call, num_rows) for call in calls(team) if call.arithmetic is RING for num_rows in (1, 300)]
    wrong: list[tuple[Call, int]] = []

    def work(offset: int) -> None:
        for index in range(len(asked)):
            call, num_rows = asked[(index + offset) % len(asked)]
            rows = rows_of(team, call, num_rows)
            if not torch.equal(team.served_model.compute(call, rows), products.compute(team.whole, call, rows)):
                wrong.append((call, num_rows))

    threads = [threading.Thread(target=work, args=(7 * number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        end(one)
    assert wrong == []
    team.served_model.close()
    assert follower.answer() == "stopped"


BAD = [
    (Call(99, FORWARD, RING), torch.zeros(1, 32, dtype=torch.int32), UnknownLayer),
    (replace(HINT, group=99), SeededRows(bytes(32), 0, 1), UnknownLayer),
    (replace(HINT, arithmetic=FLOAT), SeededRows(bytes(32), 0, 1), UnknownLayer),
    (HINT, torch.zeros(1, 32, dtype=torch.int32), InvalidTensor),
    (CALL, SeededRows(bytes(32), 0, 1), InvalidTensor),
    (CALL, torch.zeros(1, 31, dtype=torch.int32), InvalidTensor),
    (CALL, torch.zeros(0, 31, dtype=torch.int32), InvalidTensor),
    (CALL, torch.zeros(1, 32), InvalidTensor),
    (Call(0, FORWARD, FLOAT), torch.full((2, 32), float("nan")), InvalidTensor),
    (Call(0, BACKWARD, FLOAT), torch.full((2, 64), float("inf")), InvalidTensor),
]


def test_what_is_wrong_is_refused_before_any_rank_hears_of_it(
    follower: Follower, models: dict[str, Path], each: pytest.MonkeyPatch
) -> None:
    team = follower.join(each, "tensor", models["llama"])
    with each.context() as patch:
        patch.setattr(Ranks, "tell", lambda *_: pytest.fail("the ranks were told"))
        for call, rows, error in BAD:
            for product in (team.served_model.compute, lambda *request: products.compute(team.whole, *request)):
                with pytest.raises(error):
                    product(call, rows)
    rows = rows_of(team, CALL, 3)
    assert torch.equal(team.served_model.compute(CALL, rows), products.compute(team.whole, CALL, rows))
    team.served_model.close()
    assert follower.answer() == "stopped"


@pytest.mark.parametrize("direction", list(Direction))
def test_a_rank_that_cannot_compute_fails_that_product_alone(
    follower: Follower, models: dict[str, Path], each: pytest.MonkeyPatch, direction: Direction
) -> None:
    team = follower.join(each, "tensor", models["llama"], broken_group=1)
    good, bad = Call(0, direction, RING), Call(1, direction, RING)
    for call in (bad, replace(bad, arithmetic=FLOAT)):
        with pytest.raises(RemoteFault):
            team.served_model.compute(call, rows_of(team, call, 4))
    rows = rows_of(team, good, 4)
    assert torch.equal(team.served_model.compute(good, rows), products.compute(team.whole, good, rows))
    with each.context() as patch:
        patch.setattr(ColumnSlices, "share", lambda *_: 1 / 0)  # makes rank 0's own part fail
        with pytest.raises(RemoteFault):
            team.served_model.compute(good, rows)
    assert torch.equal(team.served_model.compute(good, rows), products.compute(team.whole, good, rows))
    team.served_model.close()
    assert follower.answer() == "stopped"


def test_ranks_with_different_weights_are_refused_on_every_rank(
    follower: Follower, models: dict[str, Path], each: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match="same weights"):
        follower.join(each, "tensor", models["llama"], other_model=models["gpt2"])
    assert follower.answer().startswith("ConfigurationError: the ranks do not hold the same weights")


def test_a_rank_waits_as_long_as_rank_0_is_there(
    follower: Follower, models: dict[str, Path], each: pytest.MonkeyPatch
) -> None:
    team = follower.join(each, "tensor", models["llama"], timeout_s=SHORT_S)
    beats, tell, enough = [], Ranks.tell, threading.Event()

    def count(ranks: Ranks, numbers: torch.Tensor) -> None:
        tell(ranks, numbers)
        beats.append(Command.unpack(numbers).operation)
        if len(beats) == 5:  # waits longer than the timeout
            enough.set()

    each.setattr(Ranks, "tell", count)
    comes(enough, "five heartbeats")
    assert set(beats) == {Operation.HEARTBEAT}
    rows = rows_of(team, CALL, 3)
    assert torch.equal(team.served_model.compute(CALL, rows), products.compute(team.whole, CALL, rows))
    team.dispatcher._ended.set()  # no further heartbeats are sent
    assert follower.answer().startswith("Unavailable: rank 1 ends")


def test_a_rank_whose_rank_0_is_gone_ends(
    follower: Follower, models: dict[str, Path], each: pytest.MonkeyPatch
) -> None:
    team = follower.join(each, "tensor", models["llama"], timeout_s=LONG_S)
    team.dispatcher._ended.set()
    began = time.monotonic()
    team.dispatcher._ranks.leave()
    assert follower.answer().startswith("Unavailable: rank 1 ends")
    assert time.monotonic() - began < LONG_S / 2


@pytest.mark.parametrize("parallel", ["tensor", "fsdp"])
def test_a_rank_that_hangs_is_a_typed_error_within_the_timeout(
    follower: Follower, models: dict[str, Path], each: pytest.MonkeyPatch, parallel: str
) -> None:
    team = follower.join(each, parallel, models["llama"], timeout_s=SHORT_S)
    rows = rows_of(team, CALL, 3)
    team.served_model.compute(CALL, rows)
    follower.process.send_signal(signal.SIGSTOP)
    try:
        fails_soon_and_then_at_once(team, rows, timeout_s=SHORT_S, within_s=3 * SHORT_S)
    finally:
        follower.process.send_signal(signal.SIGCONT)
    assert follower.answer().startswith("Unavailable: rank 1 ends")


def test_a_rank_that_dies_is_a_typed_error_long_before_the_timeout(
    tmp_path: Path, models: dict[str, Path], each: pytest.MonkeyPatch
) -> None:
    follower = Follower(tmp_path / "log")
    try:
        team = follower.join(each, "tensor", models["llama"], timeout_s=LONG_S)
        rows = rows_of(team, CALL, 3)
        team.served_model.compute(CALL, rows)
        follower.process.kill()
        follower.process.wait(timeout=WAIT_S)
        fails_soon_and_then_at_once(team, rows, timeout_s=LONG_S, within_s=LONG_S / 2)
    finally:
        follower.end()


def fails_soon_and_then_at_once(team: Team, rows: Rows, timeout_s: float, within_s: float) -> None:
    began = time.monotonic()
    with pytest.raises((RemoteFault, Unavailable)):  # it is the latter if a heartbeat found the loss first
        team.served_model.compute(CALL, rows)
    assert time.monotonic() - began < within_s
    began = time.monotonic()
    with pytest.raises(Unavailable, match="started again"):
        team.served_model.compute(CALL, rows)
    team.served_model.close()
    assert time.monotonic() - began < timeout_s / 2  # the loss is not waited for a second time
