"""Measures how long tenants pause between decode requests. A tenant that decodes must wait for a reply before it can
send the next request, so a tenant that hardly pauses is not decoding: it floods.

Guarantees: the pause is measured from a tenant's last reply to its next request, and is compared with the time of the
tenant's own products. So time spent waiting for other tenants makes no tenant look like a flood. The code is not safe
under threads.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_NEW = 0.1
"""The weight of the newest request in the moving means of a tenant's pauses and product times."""
_LEAST_PAUSE = 0.25
"""The least mean pause of a decoding tenant, as a share of the mean time of its products. The pause contains the time
in which the reply reaches the tenant and the next request reaches the provider."""
MOST_TENANTS = 1 << 10
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
            if len(self._tenants) > MOST_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        pause_s = 0.0 if one.num_here else None if one.left_s is None else max(0.0, now_s - one.left_s)
        if pause_s is not None:
            before_s = pause_s if one.pause_s is None else one.pause_s
            # A pause counts as at most one product's time, so that a flood cannot hide behind a few long pauses.
            one.pause_s = before_s + _NEW * (min(pause_s, product_s) - before_s)
        one.product_s += (_NEW if one.product_s else 1.0) * (product_s - one.product_s)
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
