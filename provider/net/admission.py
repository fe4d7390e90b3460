"""Decides which callers, which of their calls (streams and downloads) and which of their requests are admitted.

`AccessCheck` looks up a caller's certificate in the registry. Callers of this module must pass only certificates that
TLS has verified. `Calls` bounds each caller's number of open calls, since each call occupies a thread. `Admission`
admits or refuses requests by the operator's limits for each tenant.

Guarantees: no caller has more than `MAX_CALLS_PER_TENANT` calls open. The bound is lower once half of all threads are
taken, so that a few dozen callers cannot use up all threads. A refused call is not counted. A tenant has one quota for
all its streams, and a new connection does not reset the quota. A refused request uses up nothing of the quota. Memory
for quotas is bounded, since only a few numbers are kept for each enrolled tenant.

Threads: any thread may call `Calls`, whose `_lock` guards the counts.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from provider.identity.authority import InvalidPeerCertificate, PeerIdentity, peer_identity
from provider.identity.revocations import RegistryUnreadable, RevocationList
from provider.operations.logs import RefusalLog
from provider.schedule.quota import (
    EVERYBODY,
    LOCAL_TENANT,
    MAX_IN_FLIGHT_BYTES,
    DailyBytes,
    Quota,
    SharedRoom,
    TenantLimits,
)
from provider.schedule.ticket import RequestClass
from wire.errors import REVOKED, LimitExceeded, NotPermitted, QuotaExceeded, Unauthenticated, WireCode
from wire.limits import MAX_RETRY_S, Limits

MAX_CALLS_PER_TENANT = 8
"""The most streams and downloads that one tenant may have open."""
_CALLS_OF_EACH = 2
"""The most streams and downloads that one tenant may have open while all tenants together occupy half of the threads or
more."""


UNREADABLE = "the registry of tenants cannot be read, or its copy is too old"
"""The reason, in the log, of a refusal by `RegistryUnreadable`."""


class Calls:
    """Counts each caller's open calls (streams and downloads), and refuses further calls beyond a bound."""

    def __init__(self, most_threads: int) -> None:
        """Sets all counts to zero. `most_threads` is the number of threads for all callers together; once half as many
        calls are open, the lower bound holds."""
        self._most_threads = most_threads
        self._lock = threading.Lock()
        self._open: Counter[str] = Counter()

    def take_place(self, caller: str) -> bool:
        """Counts one more open call of a caller and returns True; returns False and counts nothing if the caller has
        too many open calls. After True, callers must call `leave` when the call ends."""
        with self._lock:
            is_crowded = 2 * self._open.total() >= self._most_threads
            if self._open[caller] >= (_CALLS_OF_EACH if is_crowded else MAX_CALLS_PER_TENANT):
                return False
            self._open[caller] += 1
            return True

    def leave(self, caller: str) -> None:
        with self._lock:
            self._open[caller] -= 1
            if self._open[caller] <= 0:
                del self._open[caller]

    def counts(self) -> dict[str, int]:
        """Returns the number of open calls by caller's name, for callers with at least one open call."""
        with self._lock:
            return dict(self._open)


@dataclass(frozen=True)
class Access:
    """Holds an admitted caller's name, and a check, made for every request, that the caller is still admitted.

    Attributes:
        tenant: the name of the tenant.
        refusal: returns None if the caller is still admitted, else the error code; raises `RegistryUnreadable` if the
            registry has been unreadable, or a copy of it has not been renewed, for too long.
    """

    tenant: str
    refusal: Callable[[], WireCode | None]


class AccessCheck:
    """Identifies callers by their certificates, and admits or refuses them. Every refusal is logged."""

    def __init__(self, revocations: RevocationList | None, refusals: RefusalLog | None = None) -> None:
        """Keeps the registry and the log of refusals; None makes a new log.

        A registry of None is for a loopback port without TLS: every caller is then the tenant `local`.
        """
        self._revocations, self._refusals = revocations, refusals or RefusalLog()

    def admit(self, cert_pem: bytes) -> Access:
        """Checks a caller's certificate and admits the caller.

        Args:
            cert_pem: the caller's certificate in PEM, which TLS has verified; empty without TLS.

        Returns:
            The caller's name, and the check for later requests.

        Raises:
            Unauthenticated: the certificate is not a tenant's, or is not registered.
            NotPermitted: the certificate was revoked.
            RegistryUnreadable: the registry cannot be read at present, or is a copy that is too old.
        """
        if self._revocations is None:
            return Access(LOCAL_TENANT, lambda: None)
        try:
            peer = peer_identity(cert_pem)
        except InvalidPeerCertificate:
            self._refusals.add(None, "its certificate is not a tenant's")
            raise
        try:
            self._revocations.check_current()
        except RegistryUnreadable:
            self._refusals.add(peer.name, UNREADABLE)
            raise
        access = Access(peer.name, lambda: self._refusal(peer))
        code = access.refusal()
        if code is WireCode.NOT_PERMITTED:
            raise NotPermitted(REVOKED)
        if code is not None:
            raise Unauthenticated("not enrolled")
        return access

    def _refusal(self, peer: PeerIdentity) -> WireCode | None:
        if self._revocations is None or self._revocations.is_enrolled(peer.serial):
            return None
        revoked = self._revocations.is_revoked(peer.serial)
        self._refusals.add(peer.name, self._revocations.why_refused(peer.serial))
        return WireCode.NOT_PERMITTED if revoked else WireCode.UNAUTHENTICATED


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
        self._weights = DailyBytes(limits.weight_bytes_per_day)
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

    def admit_weights(self, num_bytes: int, day: int, taken_before: Callable[[], int]) -> None:
        """Admits a fetch of weights, whose bytes are taken from the day's quota whether they all arrive or not.

        Args:
            num_bytes, day, taken_before: see `DailyBytes.take`.

        Raises:
            NotPermitted: the tenant may fetch no weights.
            QuotaExceeded: the bytes are more than the day has left.
        """
        if not self.limits.weight_bytes_per_day:
            raise NotPermitted("this tenant may fetch no weights")
        with self._lock:
            is_admitted = self._weights.take(num_bytes, day, taken_before)
        if not is_admitted:
            raise QuotaExceeded("more bytes of weights than this tenant may fetch in a day")

    def is_training(self, now_s: float) -> bool:
        """Returns whether the tenant sent a gradient in the last `TRAINING_S` seconds, on any stream."""
        return now_s - self._trained_at_s < TRAINING_S

    def trained(self, now_s: float) -> None:
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
