"""Tests the executor: requests that share a product do not change each other's replies, and an invalid request fails
alone."""

from __future__ import annotations

import gc
import math
import statistics
import threading
import time
import weakref
from collections.abc import Sequence

import pytest
import torch

from provider.engine.executor import Executor
from provider.engine.profile import latency_model
from provider.engine.replica import Here
from provider.engine.request import Outcome, Request
from provider.model.served_model import ServedModel
from provider.schedule.fairness import Policy
from provider.schedule.scheduler import Scheduler
from provider.schedule.ticket import Batch, Piece, RequestClass
from tests.support.executors import FLOAT, RING, Answer, Gate
from tests.support.ring_products import CALL, COLS, ring_rows
from tests.support.waiting import WAIT_S, comes, end
from wire.errors import DeadlineExceeded, InvalidTensor, RemoteFault
from wire.frame import Call, Direction, Purpose
from wire.ring.seeded_rows import Rows, SeededRows


def test_a_large_request_in_pieces_is_exact(served_model: ServedModel) -> None:
    gate = Gate(served_model, Policy(max_wait_s=0.0, max_batch_rows=50))
    rows = ring_rows(333)
    answer = gate.submit(rows)
    gate.open()
    reply = answer.get()
    gate.executor.close()
    assert isinstance(reply, torch.Tensor)
    assert torch.equal(reply, served_model.compute(CALL, rows))
    assert [count for call, count in gate.batches if call == CALL] == [50] * 6 + [33]
    assert [(tenant, request.shape[0]) for tenant, call, request, _ in gate.recorded if call == CALL] == [("acme", 333)]


def test_a_hint_in_pieces_is_exact(served_model: ServedModel) -> None:
    call = Call(0, Direction.FORWARD, RING, Purpose.HINT)
    gate = Gate(served_model, Policy(max_wait_s=0.0, max_batch_rows=50))
    seeded = SeededRows(bytes(32), 5, 120)
    answer = gate.submit(seeded, call)
    gate.open()
    reply = answer.get()
    gate.executor.close()
    assert isinstance(reply, torch.Tensor)
    assert torch.equal(reply, served_model.compute(call, seeded))


def test_cancelled_and_expired_requests_are_not_computed(gate: Gate) -> None:
    cancelled, expired, good = (
        gate.submit(ring_rows(11)),
        gate.submit(ring_rows(12), seconds=-1),
        gate.submit(ring_rows(5)),
    )
    gate.executor.cancel(cancelled.request)
    gate.open()
    assert isinstance(expired.get(), DeadlineExceeded)
    assert isinstance(good.get(), torch.Tensor)
    assert cancelled.outcomes == []
    told = {len(rows): reply for _, _, rows, reply in gate.recorded if isinstance(rows, torch.Tensor)}
    assert told[11] is None, "the provider saw them, and a recording has them"
    assert told[12] is None
    assert told[5] is not None
    assert [count for call, count in gate.batches if call == CALL] == [5]


def test_nothing_is_held_afterwards(gate: Gate) -> None:
    held: list[weakref.ref[object]] = []

    def send(number: int) -> Answer:
        rows = ring_rows(4, seed=number)
        held.append(weakref.ref(rows))
        return gate.submit(rows, tenant=f"t{number}")

    answers = [send(number) for number in range(3)]
    gate.open()
    for answer in answers:
        outcome = answer.get()
        assert isinstance(outcome, torch.Tensor)
        assert outcome.untyped_storage().nbytes() == outcome.numel() * 4  # it has its own memory
        held.append(weakref.ref(outcome))
        answer.outcomes.clear()
    del outcome, answers, answer
    gate.recorded.clear()
    gate.executor.close()
    gc.collect()
    assert [one for one in held if one() is not None] == []


def test_small_work_is_done_where_it_came_while_nothing_else_is(gate: Gate, served_model: ServedModel) -> None:
    rows = ring_rows(1)
    assert gate.executor.compute_here("a", CALL, rows) is None  # a product is being computed
    gate.open()
    assert isinstance(gate.blocker.get(), torch.Tensor)
    assert isinstance(gate.submit(rows).get(), torch.Tensor)  # the thread has then seen the end of the first
    for _ in range(1000):  # the thread may not be idle yet after the last product
        if (reply := gate.executor.compute_here("a", CALL, rows)) is not None:
            break
        gate.submit(rows).get()
    assert isinstance(reply, torch.Tensor)
    assert torch.equal(reply, served_model.compute(CALL, rows))
    assert gate.recorded[-1][0] == "a"
    call = Call(0, Direction.FORWARD, FLOAT)
    assert isinstance(gate.executor.compute_here("a", call, torch.full((1, COLS), float("nan"))), InvalidTensor)
    assert gate.recorded[-1][3] is None


def test_small_work_of_several_tenants_is_one_product(gate: Gate) -> None:
    answers = [gate.submit(ring_rows(1, seed=n), tenant=f"t{n}", kind=RequestClass.DECODE) for n in range(6)]
    assert all(not answer.outcomes for answer in answers)
    gate.open()
    for answer in answers:
        assert isinstance(answer.get(), torch.Tensor)
    assert [count for call, count in gate.batches if call == CALL] == [6]


def test_only_products_are_measured(served_model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """If other times were counted, a tenant that cancels or sends invalid requests would teach the scheduler that rows
    cost nothing."""
    gate = Gate(served_model, Policy(max_wait_s=0.0))
    measured: list[int] = []
    computed = gate.scheduler.computed

    def note(batch: Batch, seconds: float) -> None:
        measured.append(batch.num_rows)
        computed(batch, seconds)

    monkeypatch.setattr(gate.scheduler, "computed", note)
    call = Call(0, Direction.FORWARD, FLOAT)
    bad = gate.submit(torch.full((2000, COLS), float("nan")), call, "a")
    late = gate.submit(ring_rows(2001), tenant="b", seconds=-1)
    dropped = gate.submit(ring_rows(2002), Call(0, Direction.BACKWARD, RING), "c")
    dropped.request.end()  # it ends as if it was cancelled after it was chosen
    good = gate.submit(ring_rows(7), Call(2, Direction.FORWARD, RING), "d")
    gate.open()
    assert isinstance(bad.get(), InvalidTensor)
    assert isinstance(late.get(), DeadlineExceeded)
    assert isinstance(good.get(), torch.Tensor)
    assert isinstance(gate.submit(ring_rows(5)).get(), torch.Tensor)
    gate.executor.close()
    assert sorted(measured) == [1, 5, 7]  # 1 is the request that held the thread


def test_a_scheduler_that_breaks_answers_everybody_and_goes_on(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = gate.scheduler
    next_batch, left = scheduler.next_batch, [1]

    def broken(now_s: float) -> Batch | None:
        if left:
            left.pop()
            raise KeyError("secret")
        return next_batch(now_s)

    answers = [gate.submit(ring_rows(2), tenant=name) for name in "ab"]
    monkeypatch.setattr(scheduler, "next_batch", broken)
    gate.open()
    assert all(isinstance(answer.get(), RemoteFault) for answer in answers)
    assert isinstance(gate.submit(ring_rows(3)).get(), torch.Tensor)
    assert "secret" not in caplog.text


def test_rows_of_nothing(gate: Gate) -> None:
    gate.open()
    reply = gate.submit(ring_rows(0)).get()
    assert isinstance(reply, torch.Tensor)
    assert reply.shape[0] == 0


def test_a_batch_that_breaks_the_thread_is_survived(
    served_model: ServedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(served_model)
    count = gate.meter.batch

    def broken(pieces: Sequence[Piece], began_s: float, seconds: float) -> None:
        if pieces[0].num_rows == 13:
            raise ValueError("secret 123.456")
        count(pieces, began_s, seconds)

    monkeypatch.setattr(gate.meter, "batch", broken)
    broken_one = gate.submit(ring_rows(13), tenant="a")
    gate.open()
    assert isinstance(broken_one.get(), RemoteFault)
    assert isinstance(gate.submit(ring_rows(2)).get(), torch.Tensor)
    gate.executor.close()
    assert "secret" not in caplog.text


def test_profiles_are_of_this_machine(served_model: ServedModel) -> None:
    """The latency model times some products when it is made. Its predictions are within a factor of four of products
    timed here, and closer than a guess from the number of multiplications."""
    latency, guess = latency_model(served_model.served), latency_model(served_model.served, profiled=False)
    ratios, guesses = [], []
    for group in served_model.manifest().groups:
        for direction in Direction:
            call, rows = Call(group.id, direction, RING), ring_rows(64).repeat(1, 8)
            rows = rows[:, : group.widths(direction)[0]].contiguous()
            seconds = []
            for _ in range(9):
                began_s = time.perf_counter()
                served_model.compute(call, rows)
                seconds.append(time.perf_counter() - began_s)
            ratios.append(latency.predict_s(call, 64) / statistics.median(seconds))
            guesses.append(guess.predict_s(call, 64) / statistics.median(seconds))
    assert 0.25 < statistics.median(ratios) < 4
    off, guessed_off = (statistics.median(abs(math.log(one)) for one in each) for each in (ratios, guesses))
    assert off < guessed_off


def test_a_request_of_no_rows_that_was_cancelled_harms_nobody(gate: Gate) -> None:
    waiting = gate.submit(ring_rows(5))
    evil = Answer(ring_rows(0), CALL, "evil", RequestClass.DECODE)
    gate.executor.cancel(evil.request)
    gate.executor.submit(evil.request)
    gate.open()
    assert isinstance(waiting.get(), torch.Tensor)


def test_who_waits_is_woken_after_a_small_product_beside(served_model: ServedModel) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def product(call: Call, rows: Rows) -> torch.Tensor:
        if isinstance(rows, torch.Tensor) and rows.shape[0] == 1:
            inside.set()
            comes(go_on, "the rest of the test")
        return served_model.compute(call, rows)

    executor = Executor([Here(product)], Scheduler(Policy(), latency_model(served_model.served, profiled=False)))
    small = threading.Thread(target=executor.compute_here, args=("a", CALL, ring_rows(1)))
    small.start()
    comes(inside, "the small product")
    assert executor.compute_here("b", CALL, ring_rows(2)) is None  # only one product runs at a time
    answer = Answer(ring_rows(50), CALL, "b", RequestClass.PREFILL)
    executor.submit(answer.request)
    time.sleep(0.1)
    assert answer.outcomes == []
    go_on.set()
    assert isinstance(answer.get(), torch.Tensor)
    end(small)
    executor.close()


@pytest.mark.parametrize(("slo_s", "is_made"), [(0.001, True), (None, False)])
def test_under_a_target_a_small_product_does_not_wait_for_a_large_one(
    served_model: ServedModel, slo_s: float | None, is_made: bool
) -> None:
    """With a latency target (`slo_s`), one small product at a time may run beside a large one, so that the large one
    has at least half of the core. Without a target, the requests take turns."""
    inside, go_on = threading.Semaphore(0), threading.Event()

    def product(call: Call, rows: Rows) -> torch.Tensor:
        if isinstance(rows, torch.Tensor) and rows.shape[0] != 2:
            inside.release()
            comes(go_on, "the rest of the test")
        return served_model.compute(call, rows)

    policy = Policy(slo_s=slo_s)
    executor = Executor([Here(product)], Scheduler(policy, latency_model(served_model.served, profiled=False)))
    large = Answer(ring_rows(50), CALL, "b", RequestClass.PREFILL)
    executor.submit(large.request)
    assert inside.acquire(timeout=WAIT_S)
    rows = ring_rows(2)
    beside = executor.compute_here("a", CALL, rows)
    assert (beside is not None) is is_made
    if isinstance(beside, torch.Tensor):
        assert torch.equal(beside, served_model.compute(CALL, rows))
        held = threading.Thread(target=executor.compute_here, args=("a", CALL, ring_rows(1)))
        held.start()
        assert inside.acquire(timeout=WAIT_S)
        assert executor.compute_here("c", CALL, rows) is None  # only one product may run beside the large one
        go_on.set()
        end(held)
    go_on.set()
    assert isinstance(large.get(), torch.Tensor)
    executor.close()


class Clock:
    """Replaces `time`. The machine's clock advances when any thread works, and the clock of a thread when that thread
    works."""

    def __init__(self) -> None:
        self._now_s, self._own, self._lock = 1000.0, threading.local(), threading.Lock()

    def monotonic(self) -> float:
        return self._now_s

    def thread_time(self) -> float:
        return float(getattr(self._own, "worked_s", 0.0))

    def work(self, seconds: float) -> None:
        self._own.worked_s = self.thread_time() + seconds
        with self._lock:
            self._now_s += seconds


def test_what_a_small_product_beside_a_large_one_takes_is_its_own(
    served_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time of the small product counts neither in the latency model's measurement of the large product, nor in the
    usage of the large product's tenant."""
    inside, go_on = threading.Semaphore(0), threading.Event()
    clock = Clock()
    monkeypatch.setattr("provider.engine.executor.time", clock)

    def product(call: Call, rows: Rows) -> torch.Tensor:
        if isinstance(rows, torch.Tensor) and rows.shape[0] == 50:
            inside.release()
            comes(go_on, "the rest of the test")
            clock.work(0.25)
        else:
            clock.work(0.5)
        return served_model.compute(call, rows)

    charged: dict[str, float] = {}
    scheduler = Scheduler(Policy(slo_s=0.001), latency_model(served_model.served, profiled=False))
    measured: list[float] = []
    monkeypatch.setattr(scheduler, "computed", lambda batch, seconds: measured.append(seconds))
    executor = Executor([Here(product)], scheduler, charge=charged.__setitem__)
    large = Answer(ring_rows(50), CALL, "large", RequestClass.PREFILL)
    executor.submit(large.request)
    assert inside.acquire(timeout=WAIT_S)
    for _ in range(3):
        assert isinstance(executor.compute_here("small", CALL, ring_rows(2)), torch.Tensor)
    go_on.set()
    large.get()
    executor.close()
    assert charged["small"] == 0.5
    assert measured == [charged["large"]] == [0.25]  # of the 1.75 seconds that the large product took


def test_a_reply_is_given_when_the_replica_is_free(served_model: ServedModel) -> None:
    """When a reply is handed out, the replica can already compute another request. The reply may wake a thread that
    uses the core for a long time, and no request should wait for that thread."""
    executor = Executor(
        [Here(served_model.compute)], Scheduler(Policy(), latency_model(served_model.served, profiled=False))
    )
    meanwhile = []

    class Asking(Answer):
        def take(self, request: Request, outcome: Outcome) -> None:
            meanwhile.append(executor.compute_here("b", CALL, ring_rows(1)))
            super().take(request, outcome)

    answer = Asking(ring_rows(50), CALL, "a", RequestClass.PREFILL)
    executor.submit(answer.request)
    answer.get()
    executor.close()
    assert isinstance(meanwhile[0], torch.Tensor)
