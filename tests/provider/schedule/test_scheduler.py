"""Tests the scheduler's guarantees with an injected clock, without sleeps and without products."""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Callable
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scheduling import POLICIES, LoadedQueue
from provider.schedule.fairness import Policy
from provider.schedule.latency import LatencyModel
from provider.schedule.scheduler import Scheduler
from provider.schedule.ticket import Batch, RequestClass, Ticket
from wire.frame import Arithmetic, Call, Direction, Purpose

FORWARD = Call(0, Direction.FORWARD, Arithmetic.RING)
OTHER = Call(1, Direction.FORWARD, Arithmetic.RING)
BACKWARD = Call(0, Direction.BACKWARD, Arithmetic.RING)
ROW_S = 1e-4
DECODE, PREFILL, FINETUNE = RequestClass


def model() -> LatencyModel:
    """Returns a latency model with half a millisecond for each product and a tenth of a millisecond for each row, in
    every lane."""
    latency = LatencyModel(lambda call: 1000)
    for call in (FORWARD, OTHER, BACKWARD):
        for rows in (1, 100, 1, 100):
            latency.measured(call, rows, 5e-4 + rows * ROW_S)
    return latency


def scheduler(policy: Policy | None = None, **weights: float) -> Scheduler:
    return Scheduler(policy or Policy(), model(), lambda tenant: weights.get(tenant, 1.0))


def ticket(tenant: str, rows: int, kind: RequestClass = FINETUNE, call: Call = FORWARD, at: float = 0.0) -> Ticket:
    return Ticket(tenant, call, rows, kind, at)


def drain(queue: Scheduler, now: float = 1000.0) -> list[Batch]:
    """Returns all batches of the queue, at a time so late that no request is held back to wait for others."""
    batches = []
    while (batch := queue.next_batch(now)) is not None:
        batches.append(batch)
    assert len(queue) == 0
    return batches


def test_requests_of_one_lane_share_a_product() -> None:
    queue = scheduler()
    for name, call in (("a", FORWARD), ("b", OTHER), ("c", FORWARD)):
        queue.add(ticket(name, 3, call=call), 0.0)
    batches = drain(queue)
    assert [[piece.ticket.tenant for piece in batch.pieces] for batch in batches] == [["a", "c"], ["b"]]


def test_without_batching_each_runs_alone_as_it_came() -> None:
    queue = scheduler(Policy("none"))
    order = [("a", 3, FINETUNE), ("b", 1, DECODE), ("a", 5000, FINETUNE), ("c", 2, PREFILL)]
    for name, rows, kind in order:
        queue.add(ticket(name, rows, kind), 0.0)
    batches = drain(queue, 0.0)
    assert [(batch.pieces[0].ticket.tenant, batch.num_rows) for batch in batches] == [(n, r) for n, r, _ in order]
    assert all(len(batch.pieces) == 1 for batch in batches)


def test_lockstep_waits_for_everybody_who_is_active() -> None:
    queue = scheduler(Policy("lockstep", max_wait_s=0.5))
    for name in "abc":
        queue.add(ticket(name, 1, DECODE, OTHER), 0.0)
    assert queue.next_batch(0.0).num_rows == 3
    queue.add(ticket("a", 1, DECODE), 0.1)
    queue.add(ticket("b", 200, FINETUNE), 0.1)
    assert queue.next_batch(0.2) is None
    assert queue.next_due_s() == pytest.approx(0.6)
    queue.add(ticket("c", 1, DECODE), 0.3)
    assert queue.next_batch(0.3).num_rows == 202  # the small ones take as long as the large one
    queue.add(ticket("a", 1, DECODE), 0.4)
    assert queue.next_batch(0.8) is None
    assert queue.next_batch(0.9).num_rows == 1  # this is the longest possible wait


def test_a_lonely_tenant_is_never_held() -> None:
    queue = scheduler()
    queue.add(ticket("a", 500), 0.0)
    assert queue.next_batch(0.0) is not None


def test_a_large_request_is_held_for_company_and_a_decode_request_is_not() -> None:
    queue = scheduler(Policy(slo_s=0.05))
    queue.add(ticket("b", 1, DECODE), 0.0)
    assert queue.next_batch(0.0).num_rows == 1
    queue.add(ticket("a", 60), 0.0)
    assert queue.next_batch(0.0) is None
    due = queue.next_due_s()
    assert due == pytest.approx(0.25 * (5e-4 + 60 * ROW_S), rel=0.05)
    queue.add(ticket("b", 30), due / 2)  # all tenants wait, so no other will join
    assert queue.next_batch(due / 2).num_rows == 90
    queue.add(ticket("a", 90, at=0.1), 0.1)
    due = 0.25 * (5e-4 + 90 * ROW_S)
    assert queue.next_batch(0.1) is None
    assert queue.next_batch(0.1 + due).num_rows == 90


def test_the_worst_case_bounds_every_wait() -> None:
    queue = scheduler(Policy(max_wait_s=0.02))
    queue.add(ticket("b", 1, DECODE), 0.0)
    queue.next_batch(0.0)
    queue.add(ticket("a", 100_000), 0.0)
    assert queue.next_due_s() == pytest.approx(0.02)


def test_with_a_target_the_more_urgent_goes_first() -> None:
    queue = scheduler(Policy(slo_s=0.05))
    for name, kind, call in (("a", FINETUNE, FORWARD), ("b", PREFILL, OTHER), ("c", DECODE, BACKWARD)):
        queue.add(ticket(name, 10, kind, call), 0.0)
    assert [batch.pieces[0].ticket.request_class for batch in drain(queue, 0.005)] == [DECODE, PREFILL, FINETUNE]


def test_without_a_target_all_take_turns() -> None:
    queue = scheduler(Policy(wait_share=0.0))
    for name, kind, call in (("a", FINETUNE, FORWARD), ("b", PREFILL, OTHER), ("c", DECODE, BACKWARD)):
        queue.add(ticket(name, 180, kind, call), 0.0)  # each has two turns of 10 ms
    assert [batch.pieces[0].ticket.tenant for batch in drain(queue, 0.0)][:5] == list("abcab")


@pytest.mark.parametrize(("kind", "bound_s"), [(PREFILL, 0.05), (FINETUNE, 0.2)])
def test_nothing_starves(kind: RequestClass, bound_s: float) -> None:
    """There is endless decode work and one large request. A piece of the large request runs within the time bound of
    its class."""
    policy = Policy(starvation_s={PREFILL: 0.05, FINETUNE: 0.2}, slo_s=0.01)
    queue = scheduler(policy)
    queue.add(ticket("slow", 400, kind, OTHER), 0.0)
    now, last, longest, rows = 0.0, 0.0, 0.0, 0
    while rows < 400:
        queue.add(ticket("fast", 1, DECODE, at=now), now)
        batch = queue.next_batch(now)
        if batch.pieces[0].ticket.tenant == "slow":
            longest, last, rows = max(longest, now - last), now, rows + batch.num_rows
        now += 5e-4 + batch.num_rows * ROW_S
        assert now < 10
    assert longest <= bound_s + 2 * policy.slo_s


def test_a_flood_of_decode_leaves_others_a_share() -> None:
    """One tenant sends small requests without end, which count as decode. A fine-tuning tenant still gets more than a
    fifth of the time, under the default settings."""
    queue = scheduler()
    now, spent = 0.0, {"flood": 0.0, "tuner": 0.0}
    while now < 20.0:
        while len(queue) < 200:
            queue.add(ticket("flood", 16, DECODE, OTHER, now), now)
            queue.add(ticket("tuner", 512, FINETUNE, FORWARD, now), now)
        batch = queue.next_batch(now)
        seconds = 5e-4 + batch.num_rows * ROW_S
        spent[batch.pieces[0].ticket.tenant] += seconds
        now += seconds
    assert spent["tuner"] > 0.2 * now


def test_abandoned_requests_are_handed_back() -> None:
    queue = scheduler()
    tickets = [ticket("a", 1, DECODE), ticket("b", 100, FINETUNE, OTHER), ticket("a", 5000, call=BACKWARD)]
    for one in tickets:
        queue.add(one, 0.0)
    assert set(queue.abandon()) == set(tickets)
    assert not queue
    assert queue.next_batch(100.0) is None
    queue.add(ticket("a", 3), 100.0)
    assert queue.next_batch(100.0).num_rows == 3


def test_the_latency_target_cuts_large_requests() -> None:
    queue = scheduler(Policy(slo_s=0.005))
    queue.add(ticket("a", 1000, FINETUNE), 0.0)
    assert queue.next_batch(0.0).num_rows == 1000  # no tenant decodes
    queue.add(ticket("b", 1, DECODE, OTHER), 0.1)
    queue.next_batch(0.1)
    queue.add(ticket("a", 1000, FINETUNE, at=0.1), 0.1)
    batch = queue.next_batch(0.2)
    assert 5e-4 + batch.num_rows * ROW_S <= 0.005 - (5e-4 + ROW_S) + 1e-9
    assert batch.num_rows > 30


def test_fine_tuning_rows_join_as_far_as_the_target_allows() -> None:
    queue = scheduler(Policy(slo_s=0.005))
    queue.add(ticket("a", 1000, FINETUNE), 0.0)
    queue.add(ticket("b", 1, DECODE), 0.0)
    batch = queue.next_batch(0.0)
    assert {piece.ticket.tenant for piece in batch.pieces} == {"a", "b"}
    assert 40 <= batch.num_rows <= 45  # (5 ms - 0.5 ms) / 0.1 ms
    without = scheduler()
    without.add(ticket("a", 1000, FINETUNE), 0.0)
    without.add(ticket("b", 16, DECODE), 0.0)
    assert 62 <= without.next_batch(0.0).num_rows <= 66  # the turn of two tenants with one request each


def test_a_batch_is_bounded_in_memory() -> None:
    queue = Scheduler(Policy(max_batch_numbers=1000), model(), width_of=lambda call: 10)
    for name in "abc":
        queue.add(ticket(name, 70), 0.0)
    assert [batch.num_rows for batch in drain(queue, 0.02)] == [100, 100, 10]


def test_a_batch_of_decode_takes_all_that_wait() -> None:
    for policy, batches in ((Policy(slo_s=0.01), [256, 44]), (Policy(), [245, 55])):  # without a target: a turn's worth
        queue = scheduler(policy)
        for number in range(300):
            queue.add(ticket(f"t{number}", 1, DECODE), 0.0)
        assert [batch.num_rows for batch in drain(queue, 0.0)] == batches


@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.5), (3.0, 0.75)])
def test_rows_are_shared_by_weight(weight: float, share: float) -> None:
    """Two tenants have many requests of different sizes for two different products. They get numbers of rows in
    proportion to their weights."""
    queue = Scheduler(Policy(max_batch_rows=64), model(), lambda tenant: weight if tenant == "a" else 1.0)
    for _ in range(400):
        queue.add(ticket("a", 100, call=FORWARD), 0.0)
        queue.add(ticket("b", 700, call=OTHER), 0.0)
    rows: dict[str, int] = defaultdict(int)
    for _ in range(400):
        batch = queue.next_batch(1.0)
        rows[batch.pieces[0].ticket.tenant] += batch.num_rows
    assert rows["a"] / sum(rows.values()) == pytest.approx(share, abs=0.05)


def test_a_flood_moves_nobody_elses_turn() -> None:
    queue = scheduler(Policy(max_batch_rows=64))
    for _ in range(1000):
        queue.add(ticket("flood", 8, DECODE, OTHER), 0.0)
    queue.add(ticket("quiet", 1, DECODE), 0.0)
    tenants = []
    while "quiet" not in tenants:
        tenants.append(queue.next_batch(0.0).pieces[0].ticket.tenant)
    assert len(tenants) <= 3


def test_who_comes_while_one_tenant_is_alone_is_next() -> None:
    queue = scheduler(Policy(max_batch_rows=64))
    for _ in range(10):
        queue.add(ticket("flood", 64, PREFILL, OTHER), 0.0)
    assert queue.next_batch(0.0).pieces[0].ticket.tenant == "flood"
    queue.add(ticket("quiet", 64, PREFILL), 0.0)
    assert queue.next_batch(0.0).pieces[0].ticket.tenant == "quiet"


def test_a_tenant_that_leaves_in_its_turn_may_come_back() -> None:
    queue = scheduler()
    for _ in range(3):
        for name, call in (("a", FORWARD), ("b", OTHER)):
            queue.add(ticket(name, 1, DECODE, call), 0.0)
        assert [batch.pieces[0].ticket.tenant for batch in drain(queue, 0.0)] == ["a", "b"]


def test_a_hint_shares_its_product_with_nobody_and_runs_whole() -> None:
    hint = Call(0, Direction.FORWARD, Arithmetic.RING, Purpose.HINT)
    queue = scheduler(Policy(slo_s=0.005))
    for name in "ab":
        queue.add(ticket(name, 1536, call=hint), 0.0)
    assert [(len(batch.pieces), batch.num_rows) for batch in drain(queue, 0.0)] == [(1, 1536), (1, 1536)]


def test_what_was_cancelled_is_not_computed() -> None:
    queue = scheduler()
    held, ready, begun = ticket("a", 100), ticket("b", 1, DECODE, OTHER), ticket("c", 5000, call=BACKWARD)
    queue.add(begun, 0.0)
    assert queue.next_batch(0.0).num_rows == 4096
    queue.add(ready, 0.0)
    queue.add(held, 0.0)
    for one in (held, ready, begun, begun):
        queue.cancel(one)
    assert len(queue) == 0
    assert queue.next_batch(100.0) is None
    assert queue.next_due_s() is None


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"), st.integers(1, 3000), st.sampled_from(list(RequestClass)),
            st.sampled_from([FORWARD, OTHER, BACKWARD]), st.sampled_from(["add", "add", "run", "cancel"]),
        ),
        max_size=60,
    ),
    st.sampled_from(["opportunistic", "none", "lockstep"]),
    st.sampled_from([None, 0.004, 0.05]),
)  # fmt: skip
def test_every_row_is_handed_out_once_and_in_order(
    steps: list[tuple[str, int, RequestClass, Call, str]], name: str, slo_s: float | None
) -> None:
    queue = scheduler(Policy(name, slo_s=slo_s))  # type: ignore[arg-type]
    given_out: dict[Ticket, int] = defaultdict(int)
    alive: list[Ticket] = []
    cancelled: dict[Ticket, int] = {}

    def check(batch: Batch | None) -> None:
        for piece in batch.pieces if batch is not None else ():
            assert piece.ticket.call == batch.call
            assert piece.ticket not in cancelled
            assert piece.num_rows > 0
            assert piece.first_row == given_out[piece.ticket]
            given_out[piece.ticket] += piece.num_rows
            assert piece.is_last == (given_out[piece.ticket] == piece.ticket.num_rows)

    for now, (tenant, rows, kind, call, what) in zip(itertools.count(0.0, 0.003), steps, strict=False):
        if what == "add":
            alive.append(ticket(tenant, rows, kind, call, now))
            queue.add(alive[-1], now)
        elif what == "run":
            check(queue.next_batch(now))
        elif alive:
            one = alive[rows % len(alive)]
            queue.cancel(one)
            cancelled[one] = given_out[one]
    for batch in drain(queue):
        check(batch)
    for one in alive:
        assert given_out[one] == cancelled.get(one, one.num_rows)


class CountedBytecodes:
    """Counts the bytecodes that functions of provider/schedule run on this thread.

    Attributes:
        number: the count so far.
    """

    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> CountedBytecodes:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, arg: object) -> Callable[..., object] | None:
        if not frame.f_globals.get("__name__", "").startswith("provider.schedule"):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._count

    def _count(self, frame: FrameType, event: str, arg: object) -> Callable[..., object]:
        self.number += event == "opcode"
        return self._count


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decision_among_a_thousand_requests_is_cheap(policy: str) -> None:
    """The cost is counted in bytecodes, which do not depend on other load of the machine. `benchmarks.scheduling`
    measures microseconds."""
    each = {}
    for num_tenants in (40, 1000):
        queue, requests = LoadedQueue(POLICIES[policy], num_tenants), 0
        with CountedBytecodes() as counted:
            while requests < 300:
                requests += queue.turn()
        each[num_tenants] = counted.number / requests
    assert all(100 < number < 6000 for number in each.values()), each  # looking at every request would take more
    assert each[1000] < 2 * each[40]


def test_who_may_pass_the_queue() -> None:
    for name, slo_s, passes in (
        ("opportunistic", 0.01, True), ("opportunistic", None, False), ("none", None, False), ("lockstep", None, False),
    ):  # fmt: skip
        queue = scheduler(Policy(name, slo_s=slo_s))  # type: ignore[arg-type]
        assert queue.takes_decode("b", 0.0, is_idle=True) is (name != "lockstep")
        queue.add(ticket("a", 100), 0.0)
        assert queue.takes_decode("b", 0.0, is_idle=True) is passes
    queue = scheduler()
    queue.add(ticket("a", 1, DECODE), 0.0)
    assert not queue.takes_decode("b", 0.0, is_idle=True)


def test_who_passes_the_queue_does_not_pass_what_has_waited_long_enough() -> None:
    queue = scheduler(Policy(slo_s=0.001, starvation_s={PREFILL: 0.01, FINETUNE: 0.02}))
    for _ in range(3):
        queue.computed_elsewhere("b", OTHER, 0.0, 1e-4)
    queue.add(ticket("a", 100), 0.0)
    assert queue.next_batch(1e-4) is None  # a request of `b` is expected
    assert queue.takes_decode("b", 0.015, is_idle=True)
    assert not queue.takes_decode("b", 0.025, is_idle=True)
    assert queue.takes_decode("b", 0.025, is_idle=False)  # there is time for both


@pytest.mark.parametrize("weight", [0.01, 1.0, 100.0])
def test_a_turn_among_many_tenants_is_found_at_once(weight: float) -> None:
    queue = Scheduler(Policy(), LatencyModel(lambda call: 1), weight_of=lambda tenant: weight)
    for number in range(200):
        queue.add(ticket(f"t{number}", 4096, PREFILL, Call(number, Direction.FORWARD, Arithmetic.RING)), 0.0)
    seen, costs = [], []
    for _ in range(200):
        with CountedBytecodes() as counted:
            batch = queue.next_batch(0.005)
        costs.append(counted.number)
        assert batch is not None
        seen.append(batch.pieces[0].ticket.tenant)
    assert len(set(seen)) == 200  # each tenant has had its turn
    assert sorted(costs)[180] < 6000  # it was millions when rounds were computed one by one


def test_nobody_is_held_for_company_while_others_wait_anyway() -> None:
    queue = scheduler(Policy(max_wait_s=0.02))
    for call in (FORWARD, OTHER):
        queue.add(ticket("b", 1, DECODE, call), 0.0)
    assert queue.next_batch(0.0) is not None
    queue.add(ticket("a", 100), 0.0)  # `b` also calls this layer, and waits for another one
    assert queue.next_due_s() is None
    assert sum(batch.num_rows for batch in drain(queue, 0.0)) == 101


def test_turns_are_longer_among_equals_and_short_beside_a_flood() -> None:
    """Each time a large request is split, every other tenant may run one request more. So a tenant has long turns if it
    sends one large request, and short turns if it sends two at once."""
    for num_large, rows in ((1, 245), (2, 35)):  # turns of 25 and 4 ms; a product takes 0.5 ms plus 0.1 ms per row
        queue = scheduler(Policy(wait_share=0.0))
        for _ in range(num_large):
            queue.add(ticket("large", 2000), 0.0)
        for number in range(9):
            queue.add(ticket(f"t{number}", 1, DECODE, OTHER), 0.0)
        assert queue.next_batch(0.0).num_rows == pytest.approx(rows, abs=2)
