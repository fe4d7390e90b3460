"""Keeps track of the tenants that decode, of their queued requests, and of the requests that will probably come next.
Also detects tenants that flood: they send many small requests at a time without decoding.

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
"""The seconds for which a tenant counts as active after its last request."""


class Decoders:
    """Keeps track of the decoding tenants of one scheduler."""

    def __init__(self, has_classes: bool) -> None:
        """Makes a record without any tenant.

        Args:
            has_classes: whether decode requests go before other work. If not, this object neither predicts arrivals nor
                detects floods, which saves time in each of the hundred requests of a decode step.
        """
        self._has_classes = has_classes
        self._expected, self._pauses = Arrivals(), Pauses()
        self._num_queued = 0
        self._here: set[Ticket] = set()
        """Requests that arrived as decode requests and have no reply yet."""
        self._senders: OrderedDict[str, float] = OrderedDict()
        """Tenants that sent requests as decode within `ACTIVE_S`, with the time of the last request."""
        self._decoding: OrderedDict[str, float] = OrderedDict()
        """Tenants whose requests counted as decode within `ACTIVE_S`, with the time of the last request or reply."""

    def came(self, ticket: Ticket, now_s: float, product_s: float) -> None:
        """Records that a decode request enters the queue; turns the request into prefill if its tenant floods.

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
        """Records that no row of a request is queued any more. Callers call this for requests of all classes."""
        self._num_queued -= ticket.request_class is RequestClass.DECODE

    def cancelled(self, ticket: Ticket) -> None:
        """Records that a request was cancelled. Callers call this for requests of all classes."""
        if ticket in self._here:
            self._here.discard(ticket)
            self._pauses.left(ticket.tenant, None)

    def answered(self, ticket: Ticket, now_s: float) -> None:
        """Records that the last batch of a request has ended. Callers call this for requests of all classes."""
        if ticket in self._here:
            self._here.discard(ticket)
            self._pauses.left(ticket.tenant, now_s)
        if ticket.request_class is RequestClass.DECODE:
            note(self._decoding, ticket.tenant, now_s)
            if self._has_classes:
                self._expected.replied(ticket.tenant, ticket.call, now_s)

    def computed_elsewhere(self, tenant: str, call: Call, began_s: float, now_s: float) -> None:
        """Records a decode request that was computed from `began_s` to `now_s` without entering the queue."""
        note(self._decoding, tenant, now_s)
        if not self._has_classes:
            return
        note(self._senders, tenant, began_s)
        self._pauses.arrived(tenant, began_s, now_s - began_s)
        self._pauses.left(tenant, now_s)
        self._expected.arrived(tenant, began_s)
        self._expected.replied(tenant, call, now_s)

    def are_active(self, now_s: float) -> bool:
        """Returns whether a decode request is queued, or the last one came or ended at most `ACTIVE_S` seconds ago."""
        if self._num_queued:
            return True
        return bool(self._decoding) and now_s - next(reversed(self._decoding.values())) <= ACTIVE_S

    def next_s(self, now_s: float) -> tuple[float, float, int]:
        """Returns when the next decode request is expected, and two more values; see `Arrivals.next_s`."""
        return self._expected.next_s(now_s)

    def floods(self, tenant: str, now_s: float) -> bool:
        """Returns whether a tenant floods while another tenant has sent small requests within `ACTIVE_S` seconds."""
        if not self._pauses.is_flood(tenant):
            return False
        latest = itertools.islice(reversed(self._senders.items()), 2)
        return any(other != tenant and now_s - at_s <= ACTIVE_S for other, at_s in latest)


def note(seen: OrderedDict[str, float], tenant: str, now_s: float) -> None:
    """Stores in `seen` that a tenant was active at `now_s`, and drops tenants that were last active more than
    `ACTIVE_S` seconds ago."""
    seen[tenant] = now_s
    seen.move_to_end(tenant)
    while now_s - next(iter(seen.values())) > ACTIVE_S:
        seen.popitem(last=False)
