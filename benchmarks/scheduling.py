"""Measures the scheduler's processor time per request, from `add` to `finished`, with 1,000 requests queued."""

from __future__ import annotations

import itertools
import statistics
import time

from provider.schedule.fairness import Policy
from provider.schedule.latency import LatencyModel
from provider.schedule.scheduler import Scheduler
from provider.schedule.ticket import RequestClass, Ticket
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


if __name__ == "__main__":
    main()
