"""Chooses the tenant whose request runs next, by deficit round robin over tenants, and defines the operator's choices
about the order of requests (`Policy`) and the length of a tenant's turn.

In each round, every waiting tenant gets a credit: the quantum (the credit of a tenant of weight 1) times the tenant's
weight. The cost of the tenant's products, in rows or in seconds, is taken from the credit. Source: Shreedhar and
Varghese, "Efficient fair queuing using deficit round robin" (SIGCOMM 1995).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from provider.schedule.ticket import RequestClass, Ticket

PolicyName = Literal["opportunistic", "none", "lockstep"]
QUANTUM_ROWS = {RequestClass.DECODE: 8, RequestClass.PREFILL: 256, RequestClass.FINETUNE: 512}
_TURN_S, _TURN_BASES = 3.5e-3, 8.0
"""The length of a turn without a latency target, which also bounds a product while a tenant decodes. It is `_TURN_S`
seconds, but at least `_TURN_BASES` times a product's base time (the part that does not depend on its rows), since every
piece of a request reads its layer's weights again."""
_REQUEST_S, _REQUEST_BASES = 3e-3, 2.0
_LONGEST_TURN_S, _LONGEST_TURN_BASES = 25e-3, 20.0
"""If several tenants wait with one request each, a turn is longer by `_REQUEST_S` seconds, or `_REQUEST_BASES` base
times if that is more, for each tenant after the first. No turn is longer than `_LONGEST_TURN_S` seconds, or
`_LONGEST_TURN_BASES` base times if that is more. Longer turns cut a large request into fewer pieces. Each cut lets each
other tenant run one more request, which costs about `_REQUEST_S` more than its product. If a tenant waits with several
requests, turns stay short. With these base times, eight tenants get the most rows (docs/benchmarks.md, "Many tenants on
one executor")."""


@dataclass(frozen=True)
class Policy:
    """Says how requests are combined into batches.

    Attributes:
        name: `opportunistic` holds a request for a while, depending on its size, so that other requests can share its
            product; `none` runs the requests one by one in order of arrival; `lockstep` waits for all active tenants.
        max_wait_s: longest time in seconds for which a request is held, under any policy.
        wait_share: under `opportunistic`, the longest hold as a share of the request's own predicted time. Decode
            requests are not held.
        slo_s: latency target of a decode request inside the provider, in seconds; None for no target.
        starvation_s: by class, with a latency target, the longest time in seconds until a piece of the class runs,
            while more urgent work waits or is expected.
        max_batch_rows: the most rows of one product. A larger request is cut into pieces under `opportunistic`, and is
            one product under the other policies.
        max_batch_numbers: the most numbers in the input or the output of one product, which bounds a batch's memory;
            for larger requests see `max_batch_rows`.
    """

    name: PolicyName = "opportunistic"
    max_wait_s: float = 0.02
    wait_share: float = 0.25
    slo_s: float | None = None
    starvation_s: Mapping[RequestClass, float] = field(
        default_factory=lambda: {RequestClass.PREFILL: 0.01, RequestClass.FINETUNE: 0.02}
    )
    max_batch_rows: int = 4096
    max_batch_numbers: int = 1 << 24


def turn_rows(request_class: RequestClass, num_equal: int) -> float:
    """Returns how many rows a tenant of weight 1 may compute in one turn, if there is a latency target. The number does
    not depend on `num_equal`."""
    return QUANTUM_ROWS[request_class]


def turn_s(num_equal: int, base_s: float) -> float:
    """Returns how many seconds a tenant of weight 1 may compute in one turn, if there is no latency target.

    Args:
        num_equal: the number of waiting tenants if each waits with one request, else 1.
        base_s: the mean over all calls of the seconds of a product that do not depend on its rows.
    """
    shortest_s, request_s = max(_TURN_S, _TURN_BASES * base_s), max(_REQUEST_S, _REQUEST_BASES * base_s)
    return min(max(_LONGEST_TURN_S, _LONGEST_TURN_BASES * base_s), shortest_s + request_s * max(0, num_equal - 1))


_MOST_DEBT = 8
"""The most that a tenant can owe, in quanta; a quantum is the credit of one turn for a tenant of weight 1."""


class TenantRing:
    """Holds the tickets (queued requests) of one class that may run now, and gives their tenants turns.

    A tenant's own tickets run in the order in which they were added.
    """

    def __init__(self, quantum_of: Callable[[int], float], weight_of: Callable[[str], float]) -> None:
        """Makes the ring without any tickets (queued requests).

        Args:
            quantum_of: returns the credit of one turn for a tenant of weight 1, in rows or in seconds; all costs must
                be in the same unit. Its argument is the number of waiting tenants if each of them has a single ticket,
                else 1.
            weight_of: returns a tenant's weight.
        """
        self._quantum_of, self._weight_of = quantum_of, weight_of
        self._num_single, self._quantum = 0, quantum_of(1)
        self._queues: OrderedDict[str, dict[Ticket, None]] = OrderedDict()
        self._deficits: dict[str, float] = {}
        self._in_order: dict[Ticket, None] = {}
        self._whose: str | None = None
        self._served: set[str] = set()
        """Tenants that got their credit in this round, which ends when all waiting tenants have got their credit."""

    def __bool__(self) -> bool:
        return bool(self._in_order)

    def __len__(self) -> int:
        return len(self._in_order)

    @property
    def oldest(self) -> Ticket:
        """Returns the oldest ticket (queued request) of all tenants; the ring must not be empty."""
        return next(iter(self._in_order))

    @property
    def quantum(self) -> float:
        """Returns the quantum, the credit of one turn for a tenant of weight 1. It is fixed when a round begins,
        so that no tenant can gain by sending more or fewer requests during the round."""
        if not self._served:
            self._quantum = self._quantum_of(self._num_single if self._num_single == len(self._queues) else 1)
        return self._quantum

    def add(self, ticket: Ticket) -> None:
        """Adds a ticket (a queued request) at the end of its tenant's queue."""
        queue = self._queues.setdefault(ticket.tenant, {})
        queue[ticket] = None
        self._num_single += (len(queue) == 1) - (len(queue) == 2)
        self._in_order[ticket] = None

    def remove(self, ticket: Ticket) -> None:
        """Removes a queued request. If it was its tenant's only one, the tenant loses its credit, but keeps a debt as
        long as other tenants wait."""
        del self._in_order[ticket]
        queue = self._queues[ticket.tenant]
        del queue[ticket]
        self._num_single += (len(queue) == 1) - (not queue)
        if not queue:
            del self._queues[ticket.tenant]
            if self._deficits.get(ticket.tenant, 0.0) >= 0:
                self._deficits.pop(ticket.tenant, None)
            self._whose = None if self._whose == ticket.tenant else self._whose
        if not self._queues:
            self._deficits.clear()
            self._served.clear()

    def charge(self, ticket: Ticket, cost: float) -> None:
        """Takes the cost of some of a request's rows from its tenant's credit. The rows run in the tenant's own turn
        or in another tenant's batch.

        Callers must call this before `remove`. If a tenant's rows join another tenant's batch before its own turn, the
        tenant gets its credit of this round at once. Nothing is taken while no other tenant waits, and no debt grows
        beyond `_MOST_DEBT` quanta.
        """
        if len(self._queues) == 1:
            return  # No other tenant waits, so no credit is charged.
        if ticket.tenant not in self._served:
            self._give(ticket.tenant)
        left = self._deficits.get(ticket.tenant, 0.0) - cost
        self._deficits[ticket.tenant] = max(left, -_MOST_DEBT * self.quantum)

    def may_join(self, tenant: str) -> bool:
        """Returns whether a tenant's rows may join other tenants' batches; false while the tenant owes at least the
        credit of one turn."""
        return self._deficits.get(tenant, 0.0) > -self._credit(tenant)

    def turn(self, cost_of: Callable[[Ticket], float]) -> Ticket:
        """Returns the first ticket (queued request) of the tenant whose turn it is; the ring must not be empty.

        The search visits tenants in order, each at most once, up to the first tenant that can pay. If no tenant can pay
        in this round, all rounds until one tenant can pay are computed in one step. A tenant's saved credit is at most
        the cost of its next piece, or the credit of one turn if that is more.

        Args:
            cost_of: returns the cost, in rows or seconds, of a ticket's next piece (the rows of its next product).
        """
        # A single tenant takes no turns. It saves no credit, and owes nothing to a tenant that comes later.
        if len(self._queues) == 1:
            ((tenant, queue),) = self._queues.items()
            self._deficits.pop(tenant, None)
            self._served.clear()
            self._whose = tenant  # So a tenant that arrives from now on has the next turn.
            return next(iter(queue))
        tenant = next(iter(self._queues))
        if tenant == self._whose:  # This tenant still has the turn, and has already got its credit.
            head = self._head(tenant)
            if self._missing(tenant, cost_of(head)) <= 0:
                return head
            self._queues.move_to_end(tenant)
        for _ in range(len(self._queues)):
            tenant = next(iter(self._queues))
            head = self._head(tenant)
            missing = self._missing(tenant, cost_of(head))
            if tenant not in self._served:
                self._give(tenant)
                missing -= self._credit(tenant)
            if missing <= 0:
                self._whose = tenant
                return head
            self._queues.move_to_end(tenant)
        self._whose = self._after_more_rounds(cost_of)
        return self._head(self._whose)

    def _head(self, tenant: str) -> Ticket:
        return next(iter(self._queues[tenant]))

    def _missing(self, tenant: str, cost: float) -> float:
        """Returns how much credit a tenant lacks to pay `cost`; at most 0 if the tenant can pay. Before this, caps the
        saved credit at `cost` or at one turn's credit, whichever is larger."""
        saved = min(self._deficits.get(tenant, 0.0), max(cost, self._credit(tenant)))
        self._deficits[tenant] = saved
        return cost - saved

    def _give(self, tenant: str, rounds: int = 1) -> None:
        """Gives a tenant the credit of `rounds` rounds, the present round included."""
        self._deficits[tenant] = self._deficits.get(tenant, 0.0) + rounds * self._credit(tenant)
        self._served.add(tenant)

    def _after_more_rounds(self, cost_of: Callable[[Ticket], float]) -> str:
        """Gives the credit of all rounds until a tenant can pay; returns this tenant and puts it first in the order."""
        self._served.clear()
        tenants = list(self._queues)
        needed = [
            max(1, math.ceil(self._missing(one, cost_of(self._head(one))) / self._credit(one))) for one in tenants
        ]
        rounds = min(needed)
        winner = needed.index(rounds)
        for one in tenants[winner + 1 :]:
            self._deficits[one] += (rounds - 1) * self._credit(one)
        for one in tenants[: winner + 1]:
            self._give(one, rounds)
        for one in tenants[:winner]:
            self._queues.move_to_end(one)
        return tenants[winner]

    def _credit(self, tenant: str) -> float:
        return self.quantum * self._weight_of(tenant)
