"""Predicts when the next decode request will come: a tenant that decodes asks for one layer after the other, and
computes in between for about as long as the last time at that layer.

Large work that ends before then costs decode nothing, and that is all this is for: a wrong guess costs time and nothing
else. It is not safe under threads.
"""

from __future__ import annotations

from collections import OrderedDict

from wire.frame import Call

_SLOW_S = 0.05
"""Longest pause in seconds between two layers of one decode step; after a longer one the tenant counts as gone until it
asks again."""
_NEW = 0.25
"""Weight of the newest gap in the mean."""
_EARLY, _LATE, _LATE_S = 1.0, 4.0, 2e-4
"""When a request is expected and when it is late: so many mean deviations before the mean gap (Jacobson, "Congestion
avoidance and control", SIGCOMM 1988), so many after it, and at least so many seconds after it."""
_SURELY = 0.8
"""Share of the mean gap after which a request is expected at the latest."""
_MOST_GAPS = 1 << 15
MOST_TENANTS = 1 << 7
"""Most tenants that are expected at a time; of more, the one that was answered the longest ago is forgotten."""


class Arrivals:
    """Keeps the gaps by tenant and layer, and which tenants are expected."""

    def __init__(self) -> None:
        """Starts without any tenant."""
        self._gaps: OrderedDict[tuple[str, Call], tuple[float, float]] = OrderedDict()
        """The mean gap and its mean deviation, in seconds."""
        self._replied: OrderedDict[str, tuple[Call, float]] = OrderedDict()

    def replied(self, tenant: str, call: Call, now_s: float) -> None:
        """Notes that a decode request was answered."""
        self._replied[tenant] = call, now_s
        self._replied.move_to_end(tenant)
        if len(self._replied) > MOST_TENANTS:
            self._replied.popitem(last=False)

    def arrived(self, tenant: str, now_s: float) -> None:
        """Notes that a decode request came."""
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
        """Returns when the next request is expected, when to look again if it has not come, and how many tenants are
        expected.

        A tenant that is late, or whose gap is not known yet, is expected at any moment until it counts as gone.
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
