"""What each tenant may have at once: the operator's limits, kept over all streams of a tenant and over reconnects.

Guarantees: a tenant has one quota, however many streams it opens and however often it comes back; a request that is
refused takes nothing; only a few numbers are kept for each tenant, and tenants are those that were enrolled.
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
"""Seconds after a gradient for which a tenant counts as training, on all its streams."""


class InFlight(NamedTuple):
    """What a tenant has in flight, on all its streams: rows, and bytes of requests and replies."""

    num_rows: int
    num_bytes: int


class TenantAdmission:
    """One tenant's quota. It is safe under threads."""

    def __init__(self, limits: TenantLimits, room: SharedRoom) -> None:
        """Args: limits: the operator's limits; room: the room that all tenants share."""
        self.limits, self._room = limits, room
        self._lock = threading.Lock()
        self._quota: Quota | None = None
        self.num_decode = 0
        """Requests in flight that count as decode, which go before others' large ones."""
        self._trained_at_s = float("-inf")

    def admit(
        self,
        request_class: RequestClass,
        allowed_by: Collection[RequestClass],
        num_rows: int,
        num_bytes: int,
        now_s: float,
    ) -> None:
        """Admits a request; `release` gives back what it holds.

        Args:
            request_class: the class that it counts as.
            allowed_by: classes of which the tenant must have one.
            num_rows: the rows of the request.
            num_bytes: the bytes of request and reply.
            now_s: the present time.

        Raises:
            NotPermitted: the tenant has none of these classes.
            LimitExceeded: the request has more rows than one of the tenant's may have.
            QuotaExceeded: the tenant asks for too much at once; the error says when to come again.
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
        """Tells whether the tenant sent a gradient lately, on any stream."""
        return now_s - self._trained_at_s < TRAINING_S

    def trained(self, now_s: float) -> None:
        """Notes that the tenant sent a gradient."""
        self._trained_at_s = now_s

    def release(self, request_class: RequestClass, num_rows: int, num_bytes: int) -> None:
        """Notes that a request that was admitted is answered, cancelled or lost."""
        with self._lock:
            self.num_decode -= request_class is RequestClass.DECODE
            if self._quota is not None:
                self._quota.released(num_rows, num_bytes)

    def in_flight(self) -> InFlight:
        """Returns what was admitted and not yet released."""
        with self._lock:
            quota = self._quota
            return InFlight(0, 0) if quota is None else InFlight(quota.rows_in_flight, quota.bytes_in_flight)

    def announced(self, limits: Limits) -> Limits:
        """Returns the limits in this tenant's manifest, by which the tenant splits its requests and waits.

        Args:
            limits: the provider's limits.
        """
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
    """All tenants' quotas."""

    def __init__(
        self, limits: Mapping[str, TenantLimits] | None = None, max_in_flight_bytes: int = MAX_IN_FLIGHT_BYTES
    ) -> None:
        """Keeps the limits.

        Args:
            limits: the limits by tenant; those of `EVERYBODY` are for all others.
            max_in_flight_bytes: the most bytes of all tenants' requests and replies.
        """
        self._limits, self._room = dict(limits or {}), SharedRoom(max_in_flight_bytes)
        self._lock = threading.Lock()
        self._tenants: dict[str, TenantAdmission] = {}

    @property
    def num_limits(self) -> int:
        """Returns how many different limits there can be."""
        return len(self._limits) + 1

    def of(self, tenant: str) -> TenantAdmission:
        """Returns the tenant's own quota, which is made at first use."""
        with self._lock:
            known = self._tenants.get(tenant)
            if known is None:
                known = self._tenants[tenant] = TenantAdmission(self._limits_of(tenant), self._room)
            return known

    def weight_of(self, tenant: str) -> float:
        """Returns the tenant's share beside others."""
        return self._limits_of(tenant).weight

    def _limits_of(self, tenant: str) -> TenantLimits:
        return self._limits.get(tenant) or self._limits.get(EVERYBODY) or _UNLIMITED


_UNLIMITED = TenantLimits()
