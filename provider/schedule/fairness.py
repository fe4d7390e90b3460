"""Deficit round robin over tenants, by rows or by the time that they take.

Source: Shreedhar and Varghese, "Efficient fair queuing using deficit round robin" (SIGCOMM 1995).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

from provider.schedule.ticket import Ticket

_MOST_DEBT = 8
"""Most debt that a tenant can have, in quanta."""


class TenantRing:
    """Tickets of one class that are ready, and whose turn it is; a tenant's own tickets go in order of arrival."""

    def __init__(self, quantum_of: Callable[[int], float], weight_of: Callable[[str], float]) -> None:
        """Starts empty.

        Args:
            quantum_of: gives what a tenant of weight 1 may send in one turn, in the unit of all costs here; its
                argument is the number of tenants that wait if each has a single ticket, else 1.
            weight_of: gives a tenant's weight.
        """
        self._quantum_of, self._weight_of = quantum_of, weight_of
        self._num_single, self._quantum = 0, quantum_of(1)
        self._queues: OrderedDict[str, dict[Ticket, None]] = OrderedDict()
        self._deficits: dict[str, float] = {}
        self._in_order: dict[Ticket, None] = {}
        self._whose: str | None = None
        self._served: set[str] = set()
        """Tenants that had their credit in this round, which ends when all that wait have had it."""

    def __bool__(self) -> bool:
        return bool(self._in_order)

    def __len__(self) -> int:
        return len(self._in_order)

    @property
    def oldest(self) -> Ticket:
        """Returns the oldest ticket of all tenants; the ring must not be empty."""
        return next(iter(self._in_order))

    @property
    def quantum(self) -> float:
        """Returns the quantum of every turn in this round, set by the tenants that wait at its beginning: a tenant that
        could change it in between would have more."""
        if not self._served:
            self._quantum = self._quantum_of(self._num_single if self._num_single == len(self._queues) else 1)
        return self._quantum

    def add(self, ticket: Ticket) -> None:
        """Adds a ticket behind all others."""
        queue = self._queues.setdefault(ticket.tenant, {})
        queue[ticket] = None
        self._num_single += (len(queue) == 1) - (len(queue) == 2)
        self._in_order[ticket] = None

    def remove(self, ticket: Ticket) -> None:
        """Removes a ticket; a tenant that has nothing left keeps no credit, but keeps its debt while others wait."""
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
        """Charges a tenant for rows taken of a ticket, by its own turn or in another's batch; called before `remove`.

        A tenant that joins another's turn before its own in the same round has had its own with it.
        """
        if len(self._queues) == 1:
            return  # No other tenant waits.
        if ticket.tenant not in self._served:
            self._give(ticket.tenant)
        left = self._deficits.get(ticket.tenant, 0.0) - cost
        self._deficits[ticket.tenant] = max(left, -_MOST_DEBT * self.quantum)

    def may_join(self, tenant: str) -> bool:
        """Tells whether a tenant may join others' turns: not while it owes more than a turn of its own for that."""
        return self._deficits.get(tenant, 0.0) > -self._credit(tenant)

    def turn(self, cost_of: Callable[[Ticket], float]) -> Ticket:
        """Returns the first ticket of the tenant whose turn it is; the ring must not be empty.

        It looks once at each tenant up to the first that can pay; where none can in this round, as many rounds as pass
        until one can are made at once. A tenant saves no more than what comes next costs, or one turn.

        Args:
            cost_of: gives the cost of what would run at once of a ticket.
        """
        # There are no turns: nothing to gain, and nothing to owe to a tenant that comes later.
        if len(self._queues) == 1:
            ((tenant, queue),) = self._queues.items()
            self._deficits.pop(tenant, None)
            self._served.clear()
            self._whose = tenant  # A tenant that comes meanwhile is next.
            return next(iter(queue))
        tenant = next(iter(self._queues))
        if tenant == self._whose:  # This tenant is first, and has had its credit for this round.
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
        """Returns how much more credit a tenant needs; what it saved beyond a turn, or beyond that cost, expires."""
        saved = min(self._deficits.get(tenant, 0.0), max(cost, self._credit(tenant)))
        self._deficits[tenant] = saved
        return cost - saved

    def _give(self, tenant: str, rounds: int = 1) -> None:
        """Gives a tenant the credit of so many rounds, the last of which is this one."""
        self._deficits[tenant] = self._deficits.get(tenant, 0.0) + rounds * self._credit(tenant)
        self._served.add(tenant)

    def _after_more_rounds(self, cost_of: Callable[[Ticket], float]) -> str:
        """Returns the tenant whose turn it is where none can pay in this round any more, and puts it first."""
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
        """Returns the credit that one round gives."""
        return self.quantum * self._weight_of(tenant)
