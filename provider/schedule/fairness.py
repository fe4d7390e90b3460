"""Deficit round robin over tenants, by rows or by the time that they take.

Source: Shreedhar and Varghese, "Efficient fair queuing using deficit round robin" (SIGCOMM 1995).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

from provider.schedule.ticket import Ticket

_MOST_DEBT = 8
"""Quanta."""


class TenantRing:
    """Tickets of one class that are ready: whose turn it is; a tenant's own go in order of arrival."""

    def __init__(self, quantum: float, weight_of: Callable[[str], float]) -> None:
        """Args.

        quantum: what a tenant of weight 1 may send in one turn, in the unit of all costs here.
        weight_of: by tenant.
        """
        self._quantum, self._weight_of = quantum, weight_of
        self._queues: OrderedDict[str, dict[Ticket, None]] = OrderedDict()
        self._deficits: dict[str, float] = {}
        self._in_order: dict[Ticket, None] = {}
        self._whose: str | None = None

    def __bool__(self) -> bool:
        return bool(self._in_order)

    def __len__(self) -> int:
        return len(self._in_order)

    @property
    def oldest(self) -> Ticket:
        """Of all tenants; the ring must not be empty."""
        return next(iter(self._in_order))

    def add(self, ticket: Ticket) -> None:
        """Behind everything that is there."""
        self._queues.setdefault(ticket.tenant, {})[ticket] = None
        self._in_order[ticket] = None

    def remove(self, ticket: Ticket) -> None:
        """One that is there; a tenant that has nothing left keeps no credit, but its debt while others wait."""
        del self._in_order[ticket]
        queue = self._queues[ticket.tenant]
        del queue[ticket]
        if not queue:
            del self._queues[ticket.tenant]
            if self._deficits.get(ticket.tenant, 0.0) >= 0:
                self._deficits.pop(ticket.tenant, None)
            self._whose = None if self._whose == ticket.tenant else self._whose
        if not self._queues:
            self._deficits.clear()

    def charge(self, ticket: Ticket, cost: float) -> None:
        """Of what was taken of a ticket, by its turn or in somebody else's batch; before `remove`."""
        if len(self._queues) == 1:
            return  # nobody else waits
        left = self._deficits.get(ticket.tenant, 0.0) - cost
        self._deficits[ticket.tenant] = max(left, -_MOST_DEBT * self._quantum)

    def may_join(self, tenant: str) -> bool:
        """Whether a tenant may share in others' turns: not while it owes more than a turn of its own for that."""
        return self._deficits.get(tenant, 0.0) > -self._credit(tenant)

    def turn(self, cost_of: Callable[[Ticket], float]) -> Ticket:
        """The first ticket of the tenant whose turn it is; the ring must not be empty.

        As many rounds as pass until somebody has credit enough are made at once: one look at each tenant. Nobody saves
        more than what comes next costs, or one turn.

        Args:
            cost_of: what of a ticket would run at once.
        """
        heads = [(tenant, next(iter(queue))) for tenant, queue in self._queues.items()]
        if len(heads) == 1:  # no turns: nothing to gain, and nothing to owe to who comes later
            self._deficits.pop(heads[0][0], None)
            self._whose = heads[0][0]  # who comes in the meantime is next
            return heads[0][1]
        winner, rounds = 0, math.inf
        for place, (tenant, ticket) in enumerate(heads):
            cost, credit = cost_of(ticket), self._credit(tenant)
            saved = min(self._deficits.get(tenant, 0.0), max(cost, credit))
            self._deficits[tenant], missing = saved, cost - saved
            if tenant == self._whose and missing <= 0:
                return ticket  # it is first, and has had its credit for this round
            needed = max(1, math.ceil(missing / credit))
            # whose turn it was comes after all others
            if needed < rounds or (needed == rounds and heads[winner][0] == self._whose):
                winner, rounds = place, needed
        whose_is_last = heads[0][0] == self._whose
        for place, (tenant, _) in enumerate(heads):
            is_after = place > winner if not whose_is_last else (winner != 0 and (place > winner or place == 0))
            credit = (rounds - 1 if is_after else rounds) * self._credit(tenant)
            self._deficits[tenant] = self._deficits.get(tenant, 0.0) + credit
        for tenant, _ in heads[:winner]:
            self._queues.move_to_end(tenant)
        self._whose = heads[winner][0]
        return heads[winner][1]

    def _credit(self, tenant: str) -> float:
        """What one round gives."""
        return self._quantum * self._weight_of(tenant)
