"""Keeps track of the tenants that decode: their requests in the queue, the requests that will probably come next, and
the tenants that flood, which means that they send many small requests at a time without decoding.

The code reads no clock: callers pass `now_s`. It is not safe under threads.
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
"""Seconds after a tenant's last request for which the tenant counts as active."""


class Decoders:
    """Keeps track of the decoding tenants of one scheduler."""

    def __init__(self, has_classes: bool) -> None:
        """Makes a record of decoding tenants that knows no tenant yet.

        Args:
            has_classes: whether decode requests go before other work. If not, arrivals are not predicted and floods are
                not detected, which saves time in each of a decode step's hundred requests.
        """
        self._has_classes = has_classes
        self._expected, self._pauses = Arrivals(), Pauses()
        self._num_queued = 0
        self._here: set[Ticket] = set()
        """Requests that arrived as decode requests and have no reply yet."""
        self._senders: OrderedDict[str, float] = OrderedDict()
        """Tenants that lately sent requests as decode, with the time of the last one."""
        self._decoding: OrderedDict[str, float] = OrderedDict()
        """Tenants whose requests lately counted as decode, with the time of the last event."""

    def came(self, ticket: Ticket, now_s: float, product_s: float) -> None:
        """Notes that a decode request enters the queue; if its tenant floods, makes it a prefill request.

        Args:
            ticket: the request; its class may be changed.
            now_s: the present time in seconds.
            product_s: the predicted time of the request's product, in seconds.
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
        """Notes that no row of a request waits any more; callers report requests of all classes."""
        self._num_queued -= ticket.request_class is RequestClass.DECODE

    def cancelled(self, ticket: Ticket) -> None:
        """Notes that a request was cancelled; callers report requests of all classes."""
        if ticket in self._here:
            self._here.discard(ticket)
            self._pauses.left(ticket.tenant, None)

    def answered(self, ticket: Ticket, now_s: float) -> None:
        """Notes that a request is finished; callers report requests of all classes."""
        if ticket in self._here:
            self._here.discard(ticket)
            self._pauses.left(ticket.tenant, now_s)
        if ticket.request_class is RequestClass.DECODE:
            note(self._decoding, ticket.tenant, now_s)
            if self._has_classes:
                self._expected.replied(ticket.tenant, ticket.call, now_s)

    def computed_elsewhere(self, tenant: str, call: Call, began_s: float, now_s: float) -> None:
        """Notes a decode request that was computed without entering the queue."""
        note(self._decoding, tenant, now_s)
        if not self._has_classes:
            return
        note(self._senders, tenant, began_s)
        self._pauses.arrived(tenant, began_s, now_s - began_s)
        self._pauses.left(tenant, now_s)
        self._expected.arrived(tenant, began_s)
        self._expected.replied(tenant, call, now_s)

    def are_active(self, now_s: float) -> bool:
        """Returns whether any tenant decodes now, or did so within `ACTIVE_S` seconds."""
        if self._num_queued:
            return True
        return bool(self._decoding) and now_s - next(reversed(self._decoding.values())) <= ACTIVE_S

    def next_s(self, now_s: float) -> tuple[float, float, int]:
        """Predicts the next decode request; see `Arrivals.next_s`."""
        return self._expected.next_s(now_s)

    def floods(self, tenant: str, now_s: float) -> bool:
        """Returns whether a tenant floods while another tenant sends small requests, too."""
        if not self._pauses.is_flood(tenant):
            return False
        latest = itertools.islice(reversed(self._senders.items()), 2)
        return any(other != tenant and now_s - at_s <= ACTIVE_S for other, at_s in latest)


def note(seen: OrderedDict[str, float], tenant: str, now_s: float) -> None:
    """Sets the time at which the tenant was seen last; drops tenants that were not seen for `ACTIVE_S` seconds."""
    seen[tenant] = now_s
    seen.move_to_end(tenant)
    while now_s - next(iter(seen.values())) > ACTIVE_S:
        seen.popitem(last=False)
