"""What each tenant may have at once: the operator's limits, kept over all streams of a tenant and over reconnects.

Guarantees: a tenant's quota is one, however many streams it opens and however often it comes back; a request that is
refused takes nothing; nothing is kept of tenants beyond a few numbers each, and tenants are those that were enrolled.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from provider.schedule.quota import Quota, TenantLimits
from provider.schedule.request_class import RequestClass
from wire.errors import LimitExceeded, NotPermitted, QuotaExceeded
from wire.limits import MAX_RETRY_S, Limits

EVERYBODY = "*"
"""In place of a tenant's name: the limits of all that are not named. No tenant can be called so."""


class TenantAdmission:
    """One tenant's quota; safe under threads."""

    def __init__(self, limits: TenantLimits) -> None:
        """Args: limits: the operator's."""
        self.limits = limits
        self._lock = threading.Lock()
        self._quota: Quota | None = None

    def admit(self, request_class: RequestClass, num_rows: int, num_bytes: int, now_s: float) -> None:
        """Takes a request in; `release` gives back what it holds.

        Args:
            num_bytes: of request and reply.

        Raises:
            NotPermitted: this tenant may not send work of this class.
            LimitExceeded: more rows than one of its requests may have.
            QuotaExceeded: too much at once; it says when to come again.
        """
        if request_class not in self.limits.classes:
            raise NotPermitted(f"this tenant may not send {request_class.name.lower()} requests")
        most = self.limits.max_request_rows
        if most is not None and num_rows > most:
            raise LimitExceeded(f"expected at most {most} rows in a request, got {num_rows}")
        with self._lock:
            self._quota = self._quota or Quota(self.limits, now_s)
            wait_s = self._quota.admit(num_rows, num_bytes, now_s)
        if wait_s > 0:
            raise QuotaExceeded("more at once than this tenant may send", min(wait_s, MAX_RETRY_S))

    def release(self, num_rows: int, num_bytes: int) -> None:
        """A request that was admitted is answered, cancelled or lost."""
        with self._lock:
            if self._quota is not None:
                self._quota.released(num_rows, num_bytes)

    def announced(self, limits: Limits) -> Limits:
        """What this tenant's manifest says, so that it splits its requests and waits by itself.

        Args:
            limits: of the provider.
        """
        own = self.limits
        return limits.model_copy(
            update={
                "max_rows": min(limits.max_rows, own.max_request_rows or limits.max_rows),
                "max_in_flight_bytes": min(
                    limits.max_in_flight_bytes, own.max_in_flight_bytes or limits.max_in_flight_bytes
                ),
            }
        )


class Admission:
    """All tenants' quotas."""

    def __init__(self, limits: Mapping[str, TenantLimits] | None = None) -> None:
        """Args: limits: by tenant; those of `EVERYBODY` are for all others."""
        self._limits = dict(limits or {})
        self._lock = threading.Lock()
        self._tenants: dict[str, TenantAdmission] = {}

    @property
    def num_limits(self) -> int:
        """How many different limits there can be."""
        return len(self._limits) + 1

    def of(self, tenant: str) -> TenantAdmission:
        """The tenant's own, made at first use."""
        with self._lock:
            known = self._tenants.get(tenant)
            if known is None:
                known = self._tenants[tenant] = TenantAdmission(self._limits_of(tenant))
            return known

    def weight_of(self, tenant: str) -> float:
        """The tenant's share beside others."""
        return self._limits_of(tenant).weight

    def _limits_of(self, tenant: str) -> TenantLimits:
        return self._limits.get(tenant) or self._limits.get(EVERYBODY) or _UNLIMITED


_UNLIMITED = TenantLimits()
