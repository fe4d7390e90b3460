"""Admits or refuses requests by the operator's limits for each tenant.

Guarantees: a tenant has one quota for all its streams, and a new connection does not reset the quota. A refused
request uses up nothing of the quota. Memory is bounded, since only a few numbers are kept for each enrolled tenant.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import NamedTuple

from provider.schedule.quota import EVERYBODY, MAX_IN_FLIGHT_BYTES, Quota, SharedRoom, TenantLimits
from provider.schedule.request_class import RequestClass
from wire.errors import LimitExceeded, NotPermitted, QuotaExceeded
from wire.limits import MAX_RETRY_S, Limits

TRAINING_S = 60.0
"""The seconds for which a tenant counts as training, on all its streams, after it sent a gradient."""


class InFlight(NamedTuple):
    """Holds a tenant's rows in flight, and its bytes of requests and replies in flight, over all its streams."""

    num_rows: int
    num_bytes: int


class TenantAdmission:
    """Admits or refuses one tenant's requests by the operator's limits. It is safe under threads."""

    def __init__(self, limits: TenantLimits, room: SharedRoom) -> None:
        """Keeps the operator's limits for this tenant, and the bound on bytes in flight that all tenants share."""
        self.limits, self._room = limits, room
        self._lock = threading.Lock()
        self._quota: Quota | None = None
        self.num_decode = 0
        """The number of the tenant's requests in flight that count as decode."""
        self._trained_at_s = float("-inf")

    def admit(
        self,
        request_class: RequestClass,
        allowed_by: Collection[RequestClass],
        num_rows: int,
        num_bytes: int,
        now_s: float,
    ) -> None:
        """Admits a request, and counts it as in flight until `release`.

        Args:
            request_class: the class that the request counts as.
            allowed_by: the classes that permit the request; the tenant must be allowed at least one of them.
            num_rows: the number of rows of the request.
            num_bytes: the bytes of the request and its reply together.
            now_s: the present time in seconds.

        Raises:
            NotPermitted: the tenant is allowed none of these classes.
            LimitExceeded: the request has more rows than the tenant's limit for one request.
            QuotaExceeded: the request would exceed the tenant's quota; the error says when to retry.
        """
        if self.limits.classes.isdisjoint(allowed_by):
            raise NotPermitted(f"this tenant may not send {min(allowed_by).name.lower()} requests")
        most = self.limits.max_request_rows
        if most is not None and num_rows > most:
            raise LimitExceeded(f"expected at most {most} rows in a request, got {num_rows}")
        with self._lock:
            self._quota = self._quota or Quota(self.limits, now_s, self._room)
            wait_s = self._quota.admit(num_rows, num_bytes, now_s)
            self.num_decode += wait_s == 0 and request_class is RequestClass.DECODE
        if wait_s > 0:
            raise QuotaExceeded("more at once than this tenant may send", min(wait_s, MAX_RETRY_S))

    def is_training(self, now_s: float) -> bool:
        """Returns whether the tenant sent a gradient in the last `TRAINING_S` seconds, on any stream."""
        return now_s - self._trained_at_s < TRAINING_S

    def trained(self, now_s: float) -> None:
        """Records that the tenant sent a gradient at `now_s`."""
        self._trained_at_s = now_s

    def release(self, request_class: RequestClass, num_rows: int, num_bytes: int) -> None:
        """Removes an ended request from the counts of what is in flight. Every admitted request needs one such call."""
        with self._lock:
            self.num_decode -= request_class is RequestClass.DECODE
            if self._quota is not None:
                self._quota.released(num_rows, num_bytes)

    def in_flight(self) -> InFlight:
        """Returns the rows and bytes that were admitted and not yet released."""
        with self._lock:
            quota = self._quota
            return InFlight(0, 0) if quota is None else InFlight(quota.rows_in_flight, quota.bytes_in_flight)

    def announced(self, limits: Limits) -> Limits:
        """Returns the limits that this tenant's manifest announces: the smaller of the provider's `limits` and the
        tenant's own. The tenant adapts the size and number of its requests to these."""
        own = self.limits
        return limits.model_copy(
            update={
                "max_rows": min(limits.max_rows, own.max_request_rows or limits.max_rows),
                "max_in_flight_bytes": int(
                    min(
                        limits.max_in_flight_bytes,
                        own.max_in_flight_bytes or limits.max_in_flight_bytes,
                        self._room.most_of_one,
                    )
                ),
            }
        )


class Admission:
    """Holds the quotas of all tenants."""

    def __init__(
        self, limits: Mapping[str, TenantLimits] | None = None, max_in_flight_bytes: int = MAX_IN_FLIGHT_BYTES
    ) -> None:
        """Stores the limits of all tenants. At the start no tenant has a request in flight.

        Args:
            limits: the limits by tenant's name; the entry `EVERYBODY` is for all tenants without an entry of their own.
            max_in_flight_bytes: the most bytes of all tenants' requests and replies in flight, together.
        """
        self._limits, self._room = dict(limits or {}), SharedRoom(max_in_flight_bytes)
        self._lock = threading.Lock()
        self._tenants: dict[str, TenantAdmission] = {}

    @property
    def num_limits(self) -> int:
        """Returns the number of sets of limits: one for each name in the settings, and the default."""
        return len(self._limits) + 1

    def of(self, tenant: str) -> TenantAdmission:
        """Returns the object that admits a tenant's requests; the first call for a tenant creates it."""
        with self._lock:
            known = self._tenants.get(tenant)
            if known is None:
                known = self._tenants[tenant] = TenantAdmission(self._limits_of(tenant), self._room)
            return known

    def weight_of(self, tenant: str) -> float:
        """Returns the tenant's weight, which is its share of the executor relative to other tenants."""
        return self._limits_of(tenant).weight

    def _limits_of(self, tenant: str) -> TenantLimits:
        return self._limits.get(tenant) or self._limits.get(EVERYBODY) or _UNLIMITED


_UNLIMITED = TenantLimits()
