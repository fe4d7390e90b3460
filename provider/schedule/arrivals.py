"""Predicts when the next decode request will come.

A tenant that decodes calls one layer after the other. Before the next call, the tenant computes for about as long as it
did the last time at the same layer. The scheduler uses the prediction to run large work that ends before the next
decode request. A wrong prediction only costs time. The code is not safe under threads.
"""

from __future__ import annotations

from collections import OrderedDict

from wire.frame import Call

_SLOW_S = 0.05
"""Longest pause between two layers of one decode step, in seconds. After a longer pause the tenant counts as gone until
it sends another request."""
_NEW = 0.25
"""Weight of the newest gap in the moving mean; a gap is the time from a reply to the tenant's next request."""
_EARLY, _LATE, _LATE_S = 1.0, 4.0, 2e-4
"""A request is expected from `_EARLY` mean deviations before the mean gap on. It is late `_LATE` mean deviations after
the mean gap, but at least `_LATE_S` seconds after it (Jacobson, "Congestion avoidance and control", SIGCOMM 1988)."""
_SURELY = 0.8
"""Share of the mean gap after which a request is expected, however small the deviation."""
_MOST_GAPS = 1 << 15
MOST_TENANTS = 1 << 7
"""Most tenants that are expected at a time. Beyond this, the tenant with the oldest reply is forgotten."""


class Arrivals:
    """Keeps the mean gap of each tenant and call, and the tenants from which a request is expected."""

    def __init__(self) -> None:
        """Makes a record of arrivals that knows no tenant yet."""
        self._gaps: OrderedDict[tuple[str, Call], tuple[float, float]] = OrderedDict()
        """By tenant and call: the mean gap and the mean deviation of the gaps, in seconds."""
        self._replied: OrderedDict[str, tuple[Call, float]] = OrderedDict()

    def replied(self, tenant: str, call: Call, now_s: float) -> None:
        """Notes that the reply to a decode request is ready."""
        self._replied[tenant] = call, now_s
        self._replied.move_to_end(tenant)
        if len(self._replied) > MOST_TENANTS:
            self._replied.popitem(last=False)

    def arrived(self, tenant: str, now_s: float) -> None:
        """Notes that a decode request has arrived."""
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
            deviation_s += _NEW * (abs(gap_s - mean_s) - deviation_s)
            self._gaps[key] = mean_s + _NEW * (gap_s - mean_s), deviation_s
        self._gaps.move_to_end(key)
        if len(self._gaps) > _MOST_GAPS:
            self._gaps.popitem(last=False)

    def next_s(self, now_s: float) -> tuple[float, float, int]:
        """Returns the time at which the next request is expected, the time to call this again if no request has come,
        and the number of tenants from which one is expected.

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
