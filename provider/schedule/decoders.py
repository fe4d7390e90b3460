"""Keeps track of the tenants that decode and of their queued requests, predicts when the next decode request will come,
and detects tenants that flood: they send many small requests at a time without decoding.

A tenant that decodes calls one layer after the other, and must wait for a reply before it can send the next request.
Before the next call, the tenant computes for about as long as after earlier replies of the same layer. The scheduler
uses this prediction to run large work that ends before the next decode request. A wrong prediction only costs time. A
tenant that hardly pauses is not decoding: it floods.

Guarantees: a pause is measured from a tenant's last reply to its next request, and is compared with the time of the
tenant's own products. So time spent waiting for other tenants makes no tenant look like a flood. The code reads no
clock: callers pass `now_s`. Not guaranteed: the code is not safe under threads.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass

from provider.schedule.ticket import RequestClass, Ticket
from wire.frame import Call

_NEW_PAUSE = 0.1
"""The weight of the newest request in the moving means of a tenant's pauses and product times."""
_LEAST_PAUSE = 0.25
"""The least mean pause of a decoding tenant, as a share of the mean time of its products. The pause contains the time
in which the reply reaches the tenant and the next request reaches the provider."""
MOST_PAUSES = 1 << 10
"""The most tenants whose pauses are kept. If there are more, the tenant with the oldest last request is dropped."""


@dataclass(slots=True)
class _Tenant:
    num_here: int = 0
    left_s: float | None = None
    pause_s: float | None = None
    product_s: float = 0.0


class Pauses:
    """Keeps the mean pause and the mean product time of each tenant."""

    def __init__(self) -> None:
        """Makes a record without any tenant."""
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    def arrived(self, tenant: str, now_s: float, product_s: float) -> None:
        """Records that a decode request has arrived whose product alone takes `product_s` seconds."""
        one = self._tenants.get(tenant)
        if one is None:
            one = self._tenants[tenant] = _Tenant()
            if len(self._tenants) > MOST_PAUSES:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        pause_s = 0.0 if one.num_here else None if one.left_s is None else max(0.0, now_s - one.left_s)
        if pause_s is not None:
            before_s = pause_s if one.pause_s is None else one.pause_s
            # A pause counts as at most one product's time, so that a flood cannot hide behind a few long pauses.
            one.pause_s = before_s + _NEW_PAUSE * (min(pause_s, product_s) - before_s)
        one.product_s += (_NEW_PAUSE if one.product_s else 1.0) * (product_s - one.product_s)
        one.num_here += 1

    def left(self, tenant: str, now_s: float | None) -> None:
        """Records that a request was finished at `now_s`; if `now_s` is None, records that it was cancelled."""
        one = self._tenants.get(tenant)
        if one is not None:
            one.num_here, one.left_s = max(0, one.num_here - 1), now_s

    def is_flood(self, tenant: str) -> bool:
        """Returns whether a tenant floods, that is, whether its mean pause is too short for decoding."""
        one = self._tenants.get(tenant)
        return one is not None and one.pause_s is not None and one.pause_s < _LEAST_PAUSE * one.product_s


_SLOW_S = 0.05
"""The longest pause between two layers of one decode step, in seconds. After a longer pause the tenant counts as gone
until it sends another request."""
_NEW_GAP = 0.25
"""The weight of the newest gap in the moving mean; a gap is the time from a reply to the same tenant's next request."""
_EARLY, _LATE, _LATE_S = 1.0, 4.0, 2e-4
"""After a reply, a request is expected once the mean gap less `_EARLY` mean deviations has passed. It is late once the
mean gap and `_LATE` mean deviations, or the mean gap and `_LATE_S` seconds if that is longer, have passed (Jacobson,
"Congestion avoidance and control", SIGCOMM 1988)."""
_SURELY = 0.8
"""The share of the mean gap after which a request is expected, even if the mean deviation is very small."""
_MOST_GAPS = 1 << 15
MOST_DECODERS = 1 << 7
"""The most tenants from which a request is expected. If there are more, the tenant with the oldest reply is dropped."""


class Arrivals:
    """Keeps each tenant's mean gap from a reply to the next request, and the tenants that are expected to send."""

    def __init__(self) -> None:
        """Makes a record without any tenant."""
        self._gaps: OrderedDict[tuple[str, Call], tuple[float, float]] = OrderedDict()
        """Maps a tenant and a call to the mean gap and the mean deviation of the gaps, in seconds."""
        self._replied: OrderedDict[str, tuple[Call, float]] = OrderedDict()

    def replied(self, tenant: str, call: Call, now_s: float) -> None:
        """Records that the reply to a decode request is ready, so that the tenant's next request is expected."""
        self._replied[tenant] = call, now_s
        self._replied.move_to_end(tenant)
        if len(self._replied) > MOST_DECODERS:
            self._replied.popitem(last=False)

    def arrived(self, tenant: str, now_s: float) -> None:
        """Records that a decode request has arrived, and updates the mean gap after the tenant's previous call, unless
        the gap was longer than `_SLOW_S`."""
        before = self._replied.pop(tenant, None)
        if before is None:
            return
        call, replied_s = before
        gap_s = now_s - replied_s
        if gap_s > _SLOW_S:
            return
        key = tenant, call
        known = self._gaps.get(key)
        if known is None:
            self._gaps[key] = gap_s, gap_s / 4
        else:
            mean_s, deviation_s = known
            deviation_s += _NEW_GAP * (abs(gap_s - mean_s) - deviation_s)
            self._gaps[key] = mean_s + _NEW_GAP * (gap_s - mean_s), deviation_s
        self._gaps.move_to_end(key)
        if len(self._gaps) > _MOST_GAPS:
            self._gaps.popitem(last=False)

    def next_s(self, now_s: float) -> tuple[float, float, int]:
        """Returns the time at which the next decode request is expected, the time to call this again if no request has
        come by then, and the number of tenants from which a request is expected. If there is no such tenant, both times
        are infinite.

        If a tenant's request is late, or the tenant's gap is not known yet, its request is expected at once, until the
        tenant counts as gone.
        """
        first_s = again_s = float("inf")
        for tenant, (call, replied_s) in list(self._replied.items()):
            gone_s = replied_s + _SLOW_S
            if now_s >= gone_s:
                del self._replied[tenant]
                continue
            mean_s, deviation_s = self._gaps.get((tenant, call), (0.0, 0.0))
            late_s = replied_s + mean_s + max(_LATE * deviation_s, _LATE_S) if mean_s else now_s
            early_s = replied_s + max(0.0, min(mean_s - _EARLY * deviation_s, _SURELY * mean_s))
            expected_s = now_s if late_s <= now_s else early_s
            if expected_s < first_s:
                first_s, again_s = expected_s, gone_s if late_s <= now_s else late_s
        return first_s, again_s, len(self._replied)


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
