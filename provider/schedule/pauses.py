"""Measures which tenants pause between decode requests: a tenant that always has another one here is not decoding.

Guarantees: what is measured is the tenant's own: the pause from its last reply to its next request, against the time of
its products alone, so that waiting for others makes no tenant look like a flood. It is not safe under threads.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_NEW = 0.1
"""Weight of the newest request in the mean."""
_LEAST_PAUSE = 0.25
"""Least mean pause of a tenant that decodes, as a share of the time of its own products: a layer's reply has to travel
to the tenant, and the next request back."""
MOST_TENANTS = 1 << 10
"""Most tenants that are known; of more, the one that asked the longest ago is forgotten."""


@dataclass(slots=True)
class _Tenant:
    num_here: int = 0
    left_s: float | None = None
    pause_s: float | None = None
    product_s: float = 0.0


class Pauses:
    """Keeps the pauses by tenant."""

    def __init__(self) -> None:
        """Starts without any tenant."""
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()

    def arrived(self, tenant: str, now_s: float, product_s: float) -> None:
        """Notes that a decode request came, whose product takes `product_s` alone."""
        one = self._tenants.get(tenant)
        if one is None:
            one = self._tenants[tenant] = _Tenant()
            if len(self._tenants) > MOST_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        pause_s = 0.0 if one.num_here else None if one.left_s is None else max(0.0, now_s - one.left_s)
        if pause_s is not None:
            before_s = pause_s if one.pause_s is None else one.pause_s
            # One long pause says no more than a short one: a tenant that floods may stop for a moment.
            one.pause_s = before_s + _NEW * (min(pause_s, product_s) - before_s)
        one.product_s += (_NEW if one.product_s else 1.0) * (product_s - one.product_s)
        one.num_here += 1

    def left(self, tenant: str, now_s: float | None) -> None:
        """Notes that a request was answered, or cancelled if the time is None."""
        one = self._tenants.get(tenant)
        if one is not None:
            one.num_here, one.left_s = max(0, one.num_here - 1), now_s

    def is_flood(self, tenant: str) -> bool:
        """Tells whether a tenant hardly pauses."""
        one = self._tenants.get(tenant)
        return one is not None and one.pause_s is not None and one.pause_s < _LEAST_PAUSE * one.product_s
