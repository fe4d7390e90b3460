"""How much one tenant may ask for: token buckets, with the time after which a refused request may come again."""

from __future__ import annotations

import math
import threading
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field

from provider.schedule.request_class import RequestClass

EVERYBODY = "*"
"""The name that stands for all tenants that are not named. No tenant can have it."""
LOCAL_TENANT = "local"
"""The name of every caller without TLS."""
MAX_IN_FLIGHT_BYTES = 4 << 30
"""Most bytes in flight of all tenants together, where the operator says nothing."""
FULL_RETRY_S = 0.05
"""Seconds after which to come again where room comes with answers, whenever these come."""


def _by_name(given: object) -> object:
    if isinstance(given, (frozenset, set, list, tuple)):
        names = {one.name.lower(): one for one in RequestClass}
        classes = {one if isinstance(one, RequestClass) else names.get(str(one)) for one in given}
        if classes and None not in classes:
            return frozenset(classes)
    raise ValueError(f"expected a list of {', '.join(one.name.lower() for one in RequestClass)}")


class TenantLimits(BaseModel):
    """What the operator allows one tenant; None is no limit.

    Attributes:
        weight: the tenant's share of the executor beside other tenants.
        rows_per_s, bytes_per_s: sustained rates, the second of bytes of requests and replies; a burst of one second's
            worth passes at once.
        max_request_rows: the most rows in one request.
        max_rows_in_flight, max_in_flight_bytes: the most over all its requests that are not answered, on all its
            streams.
        classes: the classes of work that it may send, by name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: float = Field(default=1.0, ge=0.01, le=100)
    rows_per_s: float | None = Field(default=None, ge=1)
    bytes_per_s: ByteSize | None = Field(default=None, ge=1)
    max_request_rows: int | None = Field(default=None, ge=1)
    max_rows_in_flight: int | None = Field(default=None, ge=1)
    max_in_flight_bytes: ByteSize | None = Field(default=None, ge=1 << 20)
    classes: Annotated[frozenset[RequestClass], BeforeValidator(_by_name)] = frozenset(RequestClass)


class TokenBucket:
    """Fills at a rate, up to one second's worth; an amount larger than that passes when the bucket is full, on
    credit."""

    def __init__(self, rate: float | None, now_s: float) -> None:
        """Args: rate: units a second; None is no limit."""
        self._rate = math.inf if rate is None else rate
        self._level, self._filled_s = self._rate, now_s

    def retry_s(self, amount: float, now_s: float) -> float:
        """Returns the seconds until `amount` would pass; 0 when it passes now. It takes nothing."""
        if self._rate == math.inf:
            return 0.0
        self._level = min(self._rate, self._level + (now_s - self._filled_s) * self._rate)
        self._filled_s = now_s
        return max(0.0, (min(amount, self._rate) - self._level) / self._rate)

    def take(self, amount: float) -> None:
        """Takes an amount, after `retry_s` has returned 0."""
        self._level -= amount


class SharedRoom:
    """What all tenants hold together, such as bytes in flight. It is safe under threads.

    No tenant holds more than is still free, so that there is room left for the next one whatever the others hold: one
    alone has half of it, of two that take all they can each has a third.

    Source: Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches" (IEEE/ACM
    Transactions on Networking 6(2), 1998), with a factor of one.
    """

    def __init__(self, size: float) -> None:
        """Args: size: the most that is held, except for one amount that is larger and alone."""
        self._lock = threading.Lock()
        self._size, self._used = size, 0

    @property
    def most_of_one(self) -> float:
        """Returns what one tenant gets in many requests, where no other holds anything."""
        return self._size / 2

    def take(self, held: int, amount: int) -> bool:
        """Takes more for a tenant that holds so much already; returns whether it may have it."""
        with self._lock:
            if self._used and held + amount > self._size - self._used - amount:
                return False
            self._used += amount
            return True

    def give_back(self, amount: int) -> None:
        """Gives back what was taken."""
        with self._lock:
            self._used -= amount


class Quota:
    """One tenant's buckets, and what it has in flight. It is not safe under threads."""

    def __init__(self, limits: TenantLimits, now_s: float, room: SharedRoom | None = None) -> None:
        """Args: limits: the operator's limits; room: shared with other tenants, None where there are none."""
        self.limits = limits
        self._room = room or SharedRoom(math.inf)
        self._rows, self._bytes = TokenBucket(limits.rows_per_s, now_s), TokenBucket(limits.bytes_per_s, now_s)
        self.rows_in_flight = self.bytes_in_flight = 0
        """Rows, and bytes with their replies', of requests that were admitted and not yet released."""

    def admit(self, num_rows: int, num_bytes: int, now_s: float) -> float:
        """Admits a request and returns 0, or leaves all as it was and returns the seconds to wait first.

        Args:
            num_rows: the rows of the request.
            num_bytes: the bytes of request and reply.
            now_s: the time on any clock that does not go back.
        """
        if self._is_full(num_rows, num_bytes):
            return FULL_RETRY_S
        wait_s = max(self._rows.retry_s(num_rows, now_s), self._bytes.retry_s(num_bytes, now_s))
        if wait_s > 0:
            return wait_s
        if not self._room.take(self.bytes_in_flight, num_bytes):
            return FULL_RETRY_S
        self._rows.take(num_rows)
        self._bytes.take(num_bytes)
        self.rows_in_flight += num_rows
        self.bytes_in_flight += num_bytes
        return 0.0

    def _is_full(self, num_rows: int, num_bytes: int) -> bool:
        """Tells whether a request does not fit now. One that is larger than the room passes alone, or it never
        would."""
        rows, most_bytes = self.limits.max_rows_in_flight, self.limits.max_in_flight_bytes
        if rows is not None and self.rows_in_flight > 0 and self.rows_in_flight + num_rows > rows:
            return True
        return most_bytes is not None and self.bytes_in_flight > 0 and self.bytes_in_flight + num_bytes > most_bytes

    def released(self, num_rows: int, num_bytes: int) -> None:
        """Notes that the request is answered, cancelled or lost."""
        self.rows_in_flight -= num_rows
        self.bytes_in_flight -= num_bytes
        self._room.give_back(num_bytes)
