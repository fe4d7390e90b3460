"""How much one tenant may ask for: token buckets, with the time after which a refused request may come again."""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field

from provider.schedule.ticket import RequestClass


class TenantLimits(BaseModel):
    """What the operator allows one tenant; None is no limit.

    Attributes:
        weight: share of the executor beside other tenants.
        rows_per_s, bytes_per_s: sustained; a burst of one second's worth passes at once.
        max_request_rows: in one request.
        max_rows_in_flight: of all its requests that are not answered.
        classes: of work that it may send.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: float = Field(default=1.0, gt=0, le=1000)
    rows_per_s: float | None = Field(default=None, gt=0)
    bytes_per_s: float | None = Field(default=None, gt=0)
    max_request_rows: int | None = Field(default=None, ge=1)
    max_rows_in_flight: int | None = Field(default=None, ge=1)
    classes: frozenset[RequestClass] = frozenset(RequestClass)


class TokenBucket:
    """Fills at a rate, up to one second's worth; a request larger than that passes when it is full, on credit."""

    def __init__(self, rate: float | None, now_s: float) -> None:
        """Args: rate: units a second; None is no limit."""
        self._rate = math.inf if rate is None else rate
        self._level, self._filled_s = self._rate, now_s

    def retry_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` would pass; 0 when it passes now. Takes nothing."""
        if self._rate == math.inf:
            return 0.0
        self._level = min(self._rate, self._level + (now_s - self._filled_s) * self._rate)
        self._filled_s = now_s
        return max(0.0, (min(amount, self._rate) - self._level) / self._rate)

    def take(self, amount: float) -> None:
        """After `retry_s` said 0."""
        self._level -= amount


class Quota:
    """One tenant's buckets and rows in flight; not safe under threads."""

    def __init__(self, limits: TenantLimits, now_s: float) -> None:
        """Args: limits: the operator's."""
        self.limits = limits
        self._rows, self._bytes = TokenBucket(limits.rows_per_s, now_s), TokenBucket(limits.bytes_per_s, now_s)
        self._in_flight = 0

    def admit(self, num_rows: int, num_bytes: int, now_s: float) -> float:
        """Takes a request in and returns 0, or leaves all as it was and returns the seconds to wait first."""
        room = self.limits.max_rows_in_flight
        if room is not None and self._in_flight > 0 and self._in_flight + num_rows > room:
            return _FULL_RETRY_S
        wait_s = max(self._rows.retry_s(num_rows, now_s), self._bytes.retry_s(num_bytes, now_s))
        if wait_s > 0:
            return wait_s
        self._rows.take(num_rows)
        self._bytes.take(num_bytes)
        self._in_flight += num_rows
        return 0.0

    def released(self, num_rows: int) -> None:
        """The request is answered, cancelled or lost."""
        self._in_flight -= num_rows


_FULL_RETRY_S = 0.05
"""Where room comes with the tenant's own answers, whenever they do."""
