"""Measures the scheduler's processor time per request, from `add` to `finished`, with 1,000 requests queued.

The other half of this module simulates the scheduler under load with a simulated clock, without threads, sleeps or
products; tests/provider/schedule/test_simulation.py runs it. Tenants send one request after the other, as their models
would, and pause in between. A function gives the time of each product. The scheduler is the provider's own code, which
gets the time from the simulation. At the start it does not know how long products take, and learns this from the
simulated products. The results are the same on every machine.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from provider.schedule.fairness import Policy
from provider.schedule.latency import LatencyModel
from provider.schedule.scheduler import Scheduler
from provider.schedule.ticket import Batch, RequestClass, Ticket
from wire.frame import Arithmetic, Call, Direction

REQUESTS, GROUPS = 1000, 50
POLICIES = {"target": Policy(slo_s=0.005), "turns": Policy(), "none": Policy("none")}
TENANTS = (40, 1000)
BAR_US = 50
_PIECES, _PIECE = 15, 200


class LoadedQueue:
    """Keeps a scheduler loaded with 1,000 requests of all classes to 50 layer groups. It replaces finished requests by
    new ones.

    Attributes:
        spent_s: the processor time, in seconds, that this thread has spent in the scheduler alone.
    """

    def __init__(self, policy: Policy, num_tenants: int) -> None:
        calls = [Call(group, Direction.FORWARD, Arithmetic.RING) for group in range(GROUPS)]
        latency = LatencyModel(lambda call: 1000)
        for call in calls:
            for rows in (1, 100, 1, 100):
                latency.measured(call, rows, 5e-4 + rows * 1e-4)
        self._queue = Scheduler(policy, latency, lambda tenant: 1.0)
        self._names = itertools.cycle(f"tenant-{number}" for number in range(num_tenants))
        self._kinds = itertools.cycle(RequestClass)
        self._now_s = 0.0
        self.spent_s = 0.0
        self._add([self._ticket(1 + number % 64, calls[number % GROUPS]) for number in range(REQUESTS)])

    def turn(self) -> int:
        """Requests one batch from the scheduler, finishes the batch, replaces the requests that ended, and returns
        their number."""
        began_s = time.thread_time()
        batch = self._queue.next_batch(self._now_s)
        if batch is not None:
            self._queue.computed(batch, 1e-3)
            self._queue.finished(batch, self._now_s)
        self.spent_s += time.thread_time() - began_s
        self._now_s += 1e-3
        if batch is None:  # the scheduler waits, because a large request gives way to an expected small one
            return 0
        ended = [piece.ticket for piece in batch.pieces if piece.is_last]
        self._add([self._ticket(one.num_rows, one.call) for one in ended])
        return len(ended)

    def _ticket(self, num_rows: int, call: Call) -> Ticket:
        return Ticket(next(self._names), call, num_rows, next(self._kinds), self._now_s)

    def _add(self, tickets: list[Ticket]) -> None:
        began_s = time.thread_time()
        for ticket in tickets:
            self._queue.add(ticket, self._now_s)
        self.spent_s += time.thread_time() - began_s


def decision_s(policy: Policy, num_tenants: int) -> float:
    """Returns processor seconds per request: the median over the parts of one run, each of at least 200 requests."""
    queue, each_s = LoadedQueue(policy, num_tenants), []
    for _ in range(_PIECES):
        requests, queue.spent_s = 0, 0.0
        while requests < _PIECE:
            requests += queue.turn()
        each_s.append(queue.spent_s / requests)
    return statistics.median(each_s)


def main() -> None:
    """Runs the benchmark and prints its results as a table."""
    print(f"µs a request, {REQUESTS} queued (bar {BAR_US})\n")
    print("| policy | " + " | ".join(f"{tenants} tenants" for tenants in TENANTS) + " |")
    print("|---|" + "--:|" * len(TENANTS))
    for name, policy in POLICIES.items():
        print(f"| {name} | " + " | ".join(f"{1e6 * decision_s(policy, tenants):.1f}" for tenants in TENANTS) + " |")


Cost = Callable[[Call, int], float]


@dataclass(frozen=True)
class Replayer:
    """Describes one tenant's traffic.

    Attributes:
        tenant: the tenant's name.
        calls: the requests, as (call, number of rows), which are sent in this order and then again from the first.
        request_class: the class of all requests.
        think_s: pause from a reply to the next request, in seconds.
        in_flight: the largest number of requests that are under way at the same time.
        begins_s: the time of the first request, in seconds.
        sends: a function that says whether the tenant sends at a given time; if not, it is called again after
            `_LOOK_S`.
    """

    tenant: str
    calls: Sequence[tuple[Call, int]]
    request_class: RequestClass
    think_s: float = 0.0
    in_flight: int = 1
    begins_s: float = 0.0
    sends: Callable[[float], bool] = lambda now_s: True


@dataclass
class Outcome:
    """Holds the results of a simulation.

    Attributes:
        seconds: simulated seconds after the warm-up.
        rows: number of rows with a reply, by tenant.
        latencies_s: seconds from arrival to reply of each request, by tenant.
        batch_requests: number of requests in each product.
        busy_s: seconds of product time, by tenant; the time of a shared product is split by rows.

    Products that began during the warm-up do not count, nor do the replies to their requests.
    """

    seconds: float
    rows: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    latencies_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    batch_requests: list[int] = field(default_factory=list)
    busy_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def rows_per_s(self, *tenants: str) -> float:
        """Returns rows per second of these tenants together, or of all if none is named."""
        return sum(self.rows[name] for name in tenants or tuple(self.rows)) / self.seconds

    def mean_latency_s(self, *tenants: str) -> float:
        """Returns the mean latency, in seconds, over the requests of these tenants, or of all if none is named."""
        return statistics.fmean(one for name in tenants or tuple(self.latencies_s) for one in self.latencies_s[name])

    def quantile_s(self, share: float, *tenants: str) -> float:
        """Returns the latency, in seconds, that the share `share` of these tenants' requests does not exceed."""
        ordered = sorted(one for name in tenants or tuple(self.latencies_s) for one in self.latencies_s[name])
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


_LOOK_S = 0.01


def forward_pass(groups: Sequence[int], rows: int) -> list[tuple[Call, int]]:
    """Returns (call, number of rows) for each request of a forward pass, one for each group."""
    return [(Call(group, Direction.FORWARD, Arithmetic.RING), rows) for group in groups]


def training_step(groups: Sequence[int], rows: int) -> list[tuple[Call, int]]:
    """Returns (call, number of rows) for each request of a forward pass and a backward pass."""
    back = [(Call(group, Direction.BACKWARD, Arithmetic.RING), rows) for group in reversed(groups)]
    return [*forward_pass(groups, rows), *back]


class _Run:
    def __init__(
        self, policy: Policy, replayers: Sequence[Replayer], cost: Cost, weight_of: Callable[[str], float]
    ) -> None:
        self._cost = cost
        self._scheduler = Scheduler(policy, LatencyModel(lambda call: 1 << 19), weight_of)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._running: Batch | None = None
        self._owner: dict[Ticket, tuple[Replayer, list[int]]] = {}
        for one in replayers:
            place = [0]
            for _ in range(one.in_flight):
                self._at(one.begins_s, self._sender(one, place))

    def _at(self, when_s: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), what))

    def _sender(self, one: Replayer, place: list[int]) -> Callable[[float], None]:
        def send(now_s: float) -> None:
            if not one.sends(now_s):
                self._at(now_s + _LOOK_S, send)
                return
            call, rows = one.calls[place[0] % len(one.calls)]
            place[0] += 1
            ticket = Ticket(one.tenant, call, rows, one.request_class, now_s)
            self._owner[ticket] = one, place
            self._scheduler.add(ticket, now_s)

        return send

    def go(self, warm_up_s: float, seconds: float) -> Outcome:
        outcome, end_s = Outcome(seconds), warm_up_s + seconds
        while self._events:
            now_s = self._events[0][0]
            if now_s >= end_s:
                return outcome
            while self._events and self._events[0][0] <= now_s:
                heapq.heappop(self._events)[2](now_s)
            if self._running is None:
                self._begin(now_s, outcome if now_s >= warm_up_s else Outcome(1.0))
        return outcome

    def _begin(self, now_s: float, outcome: Outcome) -> None:
        batch = self._scheduler.next_batch(now_s)
        if batch is None:
            due_s = self._scheduler.next_due_s()
            if due_s is None and len(self._scheduler):
                raise RuntimeError("the scheduler would wait for ever with requests in its queue")
            if due_s is not None:
                self._at(max(due_s, now_s), lambda later_s: None)  # makes the simulation ask the scheduler again
            return
        self._running = batch
        took_s = self._cost(batch.call, batch.num_rows)
        outcome.batch_requests.append(len(batch.pieces))
        for piece in batch.pieces:
            outcome.busy_s[piece.ticket.tenant] += took_s * piece.num_rows / batch.num_rows

        def done(end_s: float) -> None:
            self._running = None
            self._scheduler.computed(batch, took_s)
            self._scheduler.finished(batch, end_s)
            for piece in batch.pieces:
                if piece.is_last:
                    self._reply(piece.ticket, end_s, outcome)

        self._at(now_s + took_s, done)

    def _reply(self, ticket: Ticket, now_s: float, outcome: Outcome) -> None:
        one, place = self._owner.pop(ticket)
        outcome.rows[ticket.tenant] += ticket.num_rows
        outcome.latencies_s[ticket.tenant].append(now_s - ticket.arrived_s)
        self._at(now_s + one.think_s, self._sender(one, place))


def simulate(
    policy: Policy,
    replayers: Sequence[Replayer],
    cost: Cost,
    seconds: float,
    warm_up_s: float = 1.0,
    weight_of: Callable[[str], float] = lambda tenant: 1.0,
) -> Outcome:
    """Simulates a load and returns the results.

    Args:
        policy: the scheduler's policy.
        replayers: the tenants' traffic.
        cost: a function that returns the seconds of one product, for a call and its number of rows.
        seconds: simulated seconds after the warm-up.
        warm_up_s: simulated seconds at the start, which are not counted.
        weight_of: a function that returns a tenant's weight, the relative share of the provider that it gets.
    """
    return _Run(policy, replayers, cost, weight_of).go(warm_up_s, seconds)


if __name__ == "__main__":
    main()
