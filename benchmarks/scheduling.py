"""Measures processor time a request, from `add` to `finished`, in the scheduler with 1,000 requests queued."""

from __future__ import annotations

import itertools
import statistics
import time

from provider.schedule.latency import LatencyModel
from provider.schedule.policy import Policy
from provider.schedule.request_class import RequestClass
from provider.schedule.scheduler import Scheduler
from provider.schedule.ticket import Ticket
from wire.frame import Arithmetic, Call, Direction

REQUESTS, GROUPS = 1000, 50
POLICIES = {"target": Policy(slo_s=0.005), "turns": Policy(), "none": Policy("none")}
TENANTS = (40, 1000)
BAR_US = 50
_PIECES, _PIECE = 15, 200


class LoadedQueue:
    """A scheduler with 1,000 requests of all classes, to 50 layer groups; finished requests are replaced by as many new
    ones.

    Attributes:
        spent_s: this thread's processor time in the scheduler alone.
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
        """Makes a decision, finishes its batch, adds new requests in place of those that ended, and returns how many
        these were."""
        began_s = time.thread_time()
        batch = self._queue.next_batch(self._now_s)
        if batch is not None:
            self._queue.computed(batch, 1e-3)
            self._queue.finished(batch, self._now_s)
        self.spent_s += time.thread_time() - began_s
        self._now_s += 1e-3
        if batch is None:  # large work gives way to an expected tenant
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
    """Returns processor seconds a request, the median over pieces of one run."""
    queue, each_s = LoadedQueue(policy, num_tenants), []
    for _ in range(_PIECES):
        requests, queue.spent_s = 0, 0.0
        while requests < _PIECE:
            requests += queue.turn()
        each_s.append(queue.spent_s / requests)
    return statistics.median(each_s)


def main() -> None:
    """Prints the table."""
    print(f"µs a request, {REQUESTS} queued (bar {BAR_US})\n")
    print("| policy | " + " | ".join(f"{tenants} tenants" for tenants in TENANTS) + " |")
    print("|---|" + "--:|" * len(TENANTS))
    for name, policy in POLICIES.items():
        print(f"| {name} | " + " | ".join(f"{1e6 * decision_s(policy, tenants):.1f}" for tenants in TENANTS) + " |")


if __name__ == "__main__":
    main()
