"""Tests several replicas behind one executor: they share the work, and if one is lost, another computes its unfinished
batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from provider.engine.executor import Executor
from provider.engine.products import together
from provider.engine.profile import latency_model
from provider.engine.replica import RETRY_S, Replica, ReplicaLost
from provider.engine.request import Outcome
from provider.model.served_model import ServedModel
from provider.schedule.fairness import Policy
from provider.schedule.scheduler import Scheduler
from tests.support.executors import Answer
from tests.support.ring_products import CALL, ring_rows
from tests.support.waiting import WAIT_S, comes, until
from wire.errors import InvalidTensor, RemoteFault, Unavailable
from wire.frame import Call
from wire.ring.seeded_rows import Rows, count_rows


class Scripted:
    """Behaves as a test sets: `script` may block, or raise ReplicaLost."""

    def __init__(self, served_model: ServedModel, script: Callable[[int], None] = lambda number: None) -> None:
        self._served_model, self._script = served_model, script
        self.num_asked = self.num_made = 0
        self.can_share, self.can_return, self.is_alive = False, False, True
        self.may_return = threading.Event()
        self.is_closed = False

    def product(self, call: Call, rows: Rows) -> torch.Tensor:
        self.num_asked += 1
        self._script(self.num_asked)
        reply = self._served_model.compute(call, rows)
        self.num_made += 1
        return reply

    def products(self, call: Call, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return together(self.product, call, parts)

    def revive(self, is_over: threading.Event) -> bool:
        if not self.can_return:
            return False
        while not self.may_return.wait(0.005):
            if is_over.is_set():
                return False
        return True

    def close(self) -> None:
        self.is_closed = True


def lost(number: int) -> None:
    raise ReplicaLost


@contextmanager
def executor_of(served_model: ServedModel, *replicas: Replica) -> Iterator[Executor]:
    # Pieces have at most 16 rows, so that one request has several pieces.
    scheduler = Scheduler(Policy(max_wait_s=0.0, max_batch_rows=16), latency_model(served_model.served, profiled=False))
    executor = Executor(replicas, scheduler)
    try:
        yield executor
    finally:
        executor.close()


def submit(executor: Executor, rows: Rows, tenant: str = "acme") -> Answer:
    answer = Answer(rows, CALL, tenant)
    executor.submit(answer.request)
    return answer


def is_product(served_model: ServedModel, rows: torch.Tensor, outcome: Outcome) -> bool:
    return isinstance(outcome, torch.Tensor) and torch.equal(outcome, served_model.compute(CALL, rows))


def test_two_replicas_compute_at_the_same_time(served_model: ServedModel) -> None:
    both = threading.Barrier(2, timeout=WAIT_S)
    one, other = (Scripted(served_model, lambda number: both.wait() and None) for _ in range(2))
    with executor_of(served_model, one, other) as executor:
        rows = [ring_rows(16), ring_rows(16)]
        answers = [submit(executor, each) for each in rows]
        assert all(is_product(served_model, each, answer.get()) for each, answer in zip(rows, answers, strict=True))
    assert one.num_made == other.num_made == 1
    assert one.is_closed
    assert other.is_closed


def test_pieces_of_one_request_that_end_out_of_order(served_model: ServedModel) -> None:
    has_one, last_is_done = threading.Event(), threading.Event()

    def keep_one(number: int) -> None:
        has_one.set()
        comes(last_is_done, "all other pieces")

    slow = Scripted(served_model, keep_one)
    fast = Scripted(
        served_model, lambda number: comes(has_one, "a piece of the slow one's")
    )  # otherwise it might compute all pieces
    with executor_of(served_model, slow, fast) as executor:
        rows = ring_rows(160)
        answer = submit(executor, rows)
        until(lambda: fast.num_made == 9, "the nine pieces that the slow one has not taken")
        assert not answer.outcomes  # the last rows are done, but a piece in the middle is not
        last_is_done.set()
        assert is_product(served_model, rows, answer.get())


def test_what_a_lost_replica_had_begun_another_makes(served_model: ServedModel) -> None:
    is_dying = threading.Event()

    def die_later(number: int) -> None:
        if number == 3:
            is_dying.set()
            lost(number)

    dies_later = Scripted(served_model, die_later)
    other = Scripted(served_model, lambda number: comes(is_dying, "the loss"))  # or it might make everything before
    with executor_of(served_model, dies_later, other) as executor:
        given = [ring_rows(40) for _ in range(2)]
        answers = [submit(executor, each) for each in given]
        assert all(is_product(served_model, each, answer.get()) for each, answer in zip(given, answers, strict=True))
        until(lambda: executor.num_replicas == (1, 2), "the loss to be known")
        rows = ring_rows(40)
        assert is_product(served_model, rows, submit(executor, rows).get())
    assert dies_later.num_made == 2
    assert dies_later.is_closed


def test_a_small_request_that_loses_its_replica_is_queued(served_model: ServedModel) -> None:
    with executor_of(served_model, Scripted(served_model, lost), Scripted(served_model)) as executor:
        rows = ring_rows(1)
        assert executor.compute_here("acme", CALL, rows) is None
        assert is_product(served_model, rows, submit(executor, rows).get())


def test_a_request_that_ends_replicas_is_given_up(served_model: ServedModel) -> None:
    poison = ring_rows(7)

    class Poisoned(Scripted):
        def product(self, call: Call, rows: Rows) -> torch.Tensor:
            if rows.num_rows == 7 if not isinstance(rows, torch.Tensor) else rows.shape[0] == 7:
                raise ReplicaLost
            return super().product(call, rows)

    with executor_of(served_model, *(Poisoned(served_model) for _ in range(3))) as executor:
        assert isinstance(submit(executor, poison).get(), RemoteFault)
        rows = ring_rows(8)
        assert is_product(served_model, rows, submit(executor, rows).get())
        assert executor.num_replicas[0] == 1


def test_replicas_that_were_gone_before_are_not_a_request_s_fault(served_model: ServedModel) -> None:
    def gone(number: int) -> None:
        raise ReplicaLost(began=False)

    with executor_of(
        served_model,
        Scripted(served_model, gone),
        Scripted(served_model, gone),
        Scripted(served_model, gone),
        Scripted(served_model),
    ) as executor:
        rows = ring_rows(8)
        assert is_product(served_model, rows, submit(executor, rows).get())


def test_small_requests_take_turns_over_replicas(served_model: ServedModel) -> None:
    replicas = [Scripted(served_model) for _ in range(3)]
    with executor_of(served_model, *replicas) as executor:
        for _ in range(9):
            assert isinstance(executor.compute_here("acme", CALL, ring_rows(1)), torch.Tensor)
    assert [replica.num_made for replica in replicas] == [3, 3, 3]


def test_a_fault_that_nobody_foresaw_is_an_answer(served_model: ServedModel, caplog: pytest.LogCaptureFixture) -> None:
    def broken(number: int) -> None:
        if number == 1:
            raise ZeroDivisionError("1.5")

    with executor_of(served_model, Scripted(served_model, broken)) as executor:
        assert isinstance(executor.compute_here("acme", CALL, ring_rows(1)), RemoteFault)
        rows = ring_rows(1)
        assert is_product(served_model, rows, executor.compute_here("acme", CALL, rows))  # type: ignore[arg-type]
    assert "ZeroDivisionError" in caplog.text
    assert "1.5" not in caplog.text


def test_without_a_replica_requests_are_refused_at_once(served_model: ServedModel) -> None:
    with executor_of(served_model, Scripted(served_model, lost)) as executor:
        first = submit(executor, ring_rows(3)).get()
        assert isinstance(first, Unavailable)
        until(lambda: executor.is_given_up, "the end of the lost one's thread")
        assert executor.num_replicas == (0, 1)
        assert isinstance(submit(executor, ring_rows(3)).get(), Unavailable)
        empty = submit(executor, ring_rows(0)).get()  # this request needs no replica
        assert isinstance(empty, torch.Tensor)
        assert empty.shape == (0, 64)
        assert submit(executor, ring_rows(3)).get().retry_s == 0  # type: ignore[union-attr]  # it will not come back


def test_a_replica_that_returns(served_model: ServedModel) -> None:
    replica = Scripted(served_model, lambda number: lost(number) if number == 1 else None)
    replica.can_return = True
    with executor_of(served_model, replica) as executor:
        while_lost = submit(executor, ring_rows(3)).get()
        assert isinstance(while_lost, Unavailable)
        assert while_lost.retry_s == RETRY_S
        assert executor.num_replicas == (0, 1)
        replica.may_return.set()
        until(lambda: executor.num_replicas == (1, 1), "the one that returns")
        rows = ring_rows(3)
        assert is_product(served_model, rows, submit(executor, rows).get())


def test_one_more_replica_while_it_runs(served_model: ServedModel) -> None:
    with executor_of(served_model, Scripted(served_model, lost)) as executor:
        assert isinstance(submit(executor, ring_rows(2)).get(), Unavailable)
        executor.add(Scripted(served_model))
        rows = ring_rows(5)
        assert is_product(served_model, rows, submit(executor, rows).get())


def test_one_that_goes_away_while_idle_is_noticed(served_model: ServedModel) -> None:
    replica = Scripted(served_model)
    replica.can_return = True
    with executor_of(served_model, replica) as executor:
        executor.look()
        assert executor.num_replicas == (1, 1)
        replica.is_alive = False
        executor.look()
        assert executor.num_replicas == (0, 1)
        replica.is_alive = True
        replica.may_return.set()
        until(lambda: executor.num_replicas == (1, 1), "the one that returns")
        rows = ring_rows(3)
        assert is_product(served_model, rows, submit(executor, rows).get())


def test_closing_while_a_replica_is_being_brought_back(served_model: ServedModel) -> None:
    replica = Scripted(served_model, lost)
    replica.can_return = True
    with executor_of(served_model, replica) as executor:
        assert isinstance(submit(executor, ring_rows(3)).get(), Unavailable)
    assert replica.is_closed


def test_a_loss_while_each_runs_alone_takes_nothing_from_who_was_answered(served_model: ServedModel) -> None:
    entered, go_on = threading.Event(), threading.Event()
    asked: list[int] = []

    class Picky(Scripted):
        """Fails products of several pieces, and is lost at the second of two pieces that run alone."""

        def product(self, call: Call, rows: Rows) -> torch.Tensor:
            asked.append(count_rows(rows))
            if len(asked) == 1:
                entered.set()
                comes(go_on, "the other requests")
            elif asked[-1] > 8:
                raise InvalidTensor("no company")
            if len(asked) == 4:
                raise ReplicaLost
            return super().product(call, rows)

    is_lost = threading.Event()
    other = Scripted(served_model, lambda number: comes(is_lost, "the loss"))
    with executor_of(served_model, Picky(served_model), other) as executor:
        blockers = [submit(executor, ring_rows(16)) for _ in range(2)]
        comes(entered, "the first product")
        until(lambda: other.num_asked, "the other one's")
        rows = [ring_rows(8), ring_rows(8)]
        answers = [submit(executor, each, name) for each, name in zip(rows, "ab", strict=True)]
        go_on.set()
        until(lambda: executor.num_replicas == (1, 2), "the loss to be known")
        is_lost.set()
        assert all(isinstance(one.get(), torch.Tensor) for one in blockers)
        assert all(is_product(served_model, each, answer.get()) for each, answer in zip(rows, answers, strict=True))
    assert asked == [16, 16, 8, 8]
    assert other.num_made == 2  # its own piece, and those that the lost replica had not finished
