"""When the next decode request will probably come: a tenant that decodes asks for one layer after the other, and thinks
in between for about as long as the last time at that layer.

Large work that ends before then costs decode nothing, and that is all this is for: a wrong guess costs time and nothing
else. Not safe under threads.
"""

from __future__ import annotations

from collections import OrderedDict

from wire.frame import Call

_SLOW_S = 0.05
"""A longer pause is no thinking between layers; the tenant counts as gone until it asks again."""
_NEW = 0.25
"""Weight of the newest gap."""
_LATE, _LATE_S = 0.5, 2e-4
"""How much later than expected a request may be before it is expected no longer: of its gap, and at least."""
_EARLY = 0.8
"""Of the gap: most requests come later."""
_MOST_GAPS = 1 << 15
_MOST_TENANTS = 1 << 7


class Arrivals:
    """Gaps by tenant and layer, and who is expected."""

    def __init__(self) -> None:
        """Knows nobody."""
        self._gaps: OrderedDict[tuple[str, Call], float] = OrderedDict()
        self._replied: OrderedDict[str, tuple[Call, float]] = OrderedDict()

    def replied(self, tenant: str, call: Call, now_s: float) -> None:
        """A decode request was answered."""
        self._replied[tenant] = call, now_s
        self._replied.move_to_end(tenant)
        if len(self._replied) > _MOST_TENANTS:
            self._replied.popitem(last=False)

    def arrived(self, tenant: str, now_s: float) -> None:
        """A decode request came."""
        before = self._replied.pop(tenant, None)
        if before is None:
            return
        call, replied_s = before
        gap_s = now_s - replied_s
        if gap_s > _SLOW_S:
            return
        key = tenant, call
        known = self._gaps.get(key)
        self._gaps[key] = gap_s if known is None else (1 - _NEW) * known + _NEW * gap_s
        self._gaps.move_to_end(key)
        if len(self._gaps) > _MOST_GAPS:
            self._gaps.popitem(last=False)

    def next_s(self, now_s: float) -> tuple[float, float, int]:
        """When the next request is expected, when to look again if it has not come, and how many tenants are expected.

        One that is late, or whose gap is not known yet, is expected at any moment until it counts as gone.
        """
        first_s = again_s = float("inf")
        for tenant, (call, replied_s) in list(self._replied.items()):
            gone_s = replied_s + _SLOW_S
            if now_s >= gone_s:
                del self._replied[tenant]
                continue
            gap_s = self._gaps.get((tenant, call))
            late_s = now_s if gap_s is None else replied_s + gap_s + max(_LATE * gap_s, _LATE_S)
            expected_s = now_s if gap_s is None or late_s <= now_s else replied_s + _EARLY * gap_s
            if expected_s < first_s:
                first_s, again_s = expected_s, gone_s if late_s <= now_s else late_s
        return first_s, again_s, len(self._replied)
