"""Predicts when the next decode request will come.

While a tenant decodes, it calls one layer after the other. Before the next call, the tenant computes for about as long
as after earlier replies of the same layer. The scheduler uses the prediction to run large work that ends before the
next decode request. A wrong prediction only costs time. The code is not safe under threads.
"""

from __future__ import annotations

from collections import OrderedDict

from wire.frame import Call

_SLOW_S = 0.05
"""The longest pause between two layers of one decode step, in seconds. After a longer pause the tenant counts as gone
until it sends another request."""
_NEW = 0.25
"""The weight of the newest gap in the moving mean; a gap is the time from a reply to the same tenant's next request."""
_EARLY, _LATE, _LATE_S = 1.0, 4.0, 2e-4
"""After a reply, a request is expected once the mean gap less `_EARLY` mean deviations has passed. It is late once the
mean gap and `_LATE` mean deviations, or the mean gap and `_LATE_S` seconds if that is longer, have passed (Jacobson,
"Congestion avoidance and control", SIGCOMM 1988)."""
_SURELY = 0.8
"""The share of the mean gap after which a request is expected, even if the mean deviation is very small."""
_MOST_GAPS = 1 << 15
MOST_TENANTS = 1 << 7
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
        if len(self._replied) > MOST_TENANTS:
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
            deviation_s += _NEW * (abs(gap_s - mean_s) - deviation_s)
            self._gaps[key] = mean_s + _NEW * (gap_s - mean_s), deviation_s
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
