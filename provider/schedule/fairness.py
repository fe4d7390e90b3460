"""Deficit round robin over tenants, by rows. Source: Shreedhar and Varghese, "Efficient fair queuing using deficit
round robin" (SIGCOMM 1995)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from provider.schedule.ticket import Ticket

_MOST_DEBT = 8
"""Quanta; rows that ran in others' batches cost those batches little."""


class TenantRing:
    """Tickets of one class that are ready: whose turn it is; a tenant's own go in order of arrival."""

    def __init__(self, quantum_rows: int, weight_of: Callable[[str], float]) -> None:
        """Args.

        quantum_rows: what a tenant of weight 1 may send in one turn.
        weight_of: by tenant.
        """
        self._quantum_rows, self._weight_of = quantum_rows, weight_of
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

    def charge(self, ticket: Ticket, num_rows: int) -> None:
        """Rows that were taken of a ticket, by its turn or in somebody else's batch; before `remove`."""
        if len(self._queues) == 1:
            return  # nobody else waits
        left = self._deficits.get(ticket.tenant, 0.0) - num_rows
        self._deficits[ticket.tenant] = max(left, -_MOST_DEBT * self._quantum_rows)

    def turn(self, needed_rows: Callable[[Ticket], int]) -> Ticket:
        """The first ticket of the tenant whose turn it is; the ring must not be empty.

        Args:
            needed_rows: how many rows of a ticket would run at once.
        """
        while True:
            tenant, queue = next(iter(self._queues.items()))
            ticket = next(iter(queue))
            needed = needed_rows(ticket)
            if len(self._queues) == 1:  # no turns: nothing to gain, and nothing to owe to who comes later
                self._deficits.pop(tenant, None)
                return ticket
            if tenant != self._whose:
                self._whose = tenant
                self._deficits[tenant] = self._deficits.get(tenant, 0.0) + self._quantum_rows * self._weight_of(tenant)
            if self._deficits[tenant] >= needed:
                return ticket
            self._queues.move_to_end(tenant)
            self._whose = None
