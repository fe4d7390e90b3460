"""Keeps which tenants decode: whose small requests are here, which will probably send one next, and which only seem to.

It never looks at a clock: `now_s` comes with every call. It is not safe under threads.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict

from provider.schedule.arrivals import Arrivals
from provider.schedule.pauses import Pauses
from provider.schedule.request_class import RequestClass
from provider.schedule.ticket import Ticket
from wire.frame import Call

ACTIVE_S = 1.0
"""Seconds after its last request for which a tenant may send again soon."""


class Decoders:
    """The decoding tenants of one scheduler."""

    def __init__(self, has_classes: bool) -> None:
        """Starts without any tenant.

        Args:
            has_classes: whether decode goes before other work. If not, no tenant is expected or checked for a flood,
                since a decode step is a hundred requests.
        """
        self._has_classes = has_classes
        self._expected, self._pauses = Arrivals(), Pauses()
        self._num_queued = 0
        self._here: set[Ticket] = set()
        """Requests that came as decode and have not been answered."""
        self._senders: OrderedDict[str, float] = OrderedDict()
        """Tenants that sent such requests lately, and when."""
        self._decoding: OrderedDict[str, float] = OrderedDict()
        """Tenants whose requests counted as decode, and when."""

    def came(self, ticket: Ticket, now_s: float, product_s: float) -> None:
        """Notes a request into the queue that came as decode; one of a flood is prefill from now on.

        Args:
            ticket: the request.
            now_s: the present time.
            product_s: how long its product takes.
        """
        if self._has_classes:
            self._here.add(ticket)
            note(self._senders, ticket.tenant, now_s)
            self._pauses.arrived(ticket.tenant, now_s, product_s)
            if self.floods(ticket.tenant, now_s):
                ticket.request_class = RequestClass.PREFILL
                return
            self._expected.arrived(ticket.tenant, now_s)
        self._num_queued += 1
        note(self._decoding, ticket.tenant, now_s)

    def left_queue(self, ticket: Ticket) -> None:
        """Notes that no row of a request waits any more, whatever its class."""
        self._num_queued -= ticket.request_class is RequestClass.DECODE

    def cancelled(self, ticket: Ticket) -> None:
        """Notes that a request will not be answered, whatever its class."""
        if ticket in self._here:
            self._here.discard(ticket)
            self._pauses.left(ticket.tenant, None)

    def answered(self, ticket: Ticket, now_s: float) -> None:
        """Notes that a request is over, whatever its class."""
        if ticket in self._here:
            self._here.discard(ticket)
            self._pauses.left(ticket.tenant, now_s)
        if ticket.request_class is RequestClass.DECODE:
            note(self._decoding, ticket.tenant, now_s)
            if self._has_classes:
                self._expected.replied(ticket.tenant, ticket.call, now_s)

    def computed_elsewhere(self, tenant: str, call: Call, began_s: float, now_s: float) -> None:
        """Notes that a request that was never queued came and was answered."""
        note(self._decoding, tenant, now_s)
        if not self._has_classes:
            return
        note(self._senders, tenant, began_s)
        self._pauses.arrived(tenant, began_s, now_s - began_s)
        self._pauses.left(tenant, now_s)
        self._expected.arrived(tenant, began_s)
        self._expected.replied(tenant, call, now_s)

    def are_active(self, now_s: float) -> bool:
        """Tells whether any tenant decodes, or has lately."""
        if self._num_queued:
            return True
        return bool(self._decoding) and now_s - next(reversed(self._decoding.values())) <= ACTIVE_S

    def next_s(self, now_s: float) -> tuple[float, float, int]:
        """Returns what `Arrivals.next_s` returns."""
        return self._expected.next_s(now_s)

    def floods(self, tenant: str, now_s: float) -> bool:
        """Tells whether a tenant's small requests are no decoding, while another tenant sends such, too."""
        if not self._pauses.is_flood(tenant):
            return False
        latest = itertools.islice(reversed(self._senders.items()), 2)
        return any(other != tenant and now_s - at_s <= ACTIVE_S for other, at_s in latest)


def note(seen: OrderedDict[str, float], tenant: str, now_s: float) -> None:
    """Notes that the tenant was seen now; drops tenants that were not seen for long."""
    seen[tenant] = now_s
    seen.move_to_end(tenant)
    while now_s - next(iter(seen.values())) > ACTIVE_S:
        seen.popitem(last=False)
