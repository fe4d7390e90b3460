"""Limits what one tenant may request, by token buckets (limits on rates) and by bounds on requests in flight.

A request beyond a limit is refused, and the refusal says after how many seconds the tenant may retry.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field

from provider.schedule.ticket import RequestClass

EVERYBODY = "*"
"""The name, in the operator's limits, for all tenants that are not named there. No tenant can have this name."""
LOCAL_TENANT = "local"
"""The name that every tenant has if the provider runs without TLS."""
MAX_IN_FLIGHT_BYTES = 4 << 30
"""The default for the most bytes in flight, over all tenants."""
FULL_RETRY_S = 0.05
"""The seconds after which a tenant may retry if too much is in flight; when a request will end is not known."""


def _by_name(given: object) -> object:
    if isinstance(given, (frozenset, set, list, tuple)):
        names = {one.name.lower(): one for one in RequestClass}
        classes = {one if isinstance(one, RequestClass) else names.get(str(one)) for one in given}
        if classes and None not in classes:
            return frozenset(classes)
    raise ValueError(f"expected a list of {', '.join(one.name.lower() for one in RequestClass)}")


class TenantLimits(BaseModel):
    """Holds the operator's limits for one tenant; None means no limit.

    Attributes:
        weight: the tenant's share of the executor, relative to the weights of other tenants.
        rows_per_s, bytes_per_s: sustained rates of rows, and of the bytes of requests and replies. A burst of one
            second's worth passes at once.
        max_request_rows: the most rows in one request.
        max_rows_in_flight, max_in_flight_bytes: the most rows and bytes of the tenant's unfinished requests, over all
            its streams.
        classes: the classes of work that the tenant may send; given as a list of names.
        weight_bytes_per_day: the most bytes of the model's int8 weights that the tenant may fetch in a UTC day
            (wire/SPEC.md, section 2); with 0 it may fetch none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: float = Field(default=1.0, ge=0.01, le=100)
    rows_per_s: float | None = Field(default=None, ge=1)
    bytes_per_s: ByteSize | None = Field(default=None, ge=1)
    max_request_rows: int | None = Field(default=None, ge=1)
    max_rows_in_flight: int | None = Field(default=None, ge=1)
    max_in_flight_bytes: ByteSize | None = Field(default=None, ge=1 << 20)
    classes: Annotated[frozenset[RequestClass], BeforeValidator(_by_name)] = frozenset(RequestClass)
    weight_bytes_per_day: ByteSize = Field(default=ByteSize(0), ge=0)


class TokenBucket:
    """Limits a rate, for example of rows per second. The bucket refills at this rate, holds at most what one second
    brings, and each request takes its own amount out. A request that is larger than the bucket passes when the bucket
    is full; the bucket's level is then below zero until it has refilled."""

    def __init__(self, rate: float | None, now_s: float) -> None:
        """Makes a full bucket. `rate` is in units per second; None sets no limit."""
        self._rate = math.inf if rate is None else rate
        self._level, self._filled_s = self._rate, now_s

    def retry_s(self, amount: float, now_s: float) -> float:
        """Returns the seconds until `amount` may be taken, or 0 if it may be taken now; takes nothing."""
        if self._rate == math.inf:
            return 0.0
        self._level = min(self._rate, self._level + (now_s - self._filled_s) * self._rate)
        self._filled_s = now_s
        return max(0.0, (min(amount, self._rate) - self._level) / self._rate)

    def take(self, amount: float) -> None:
        """Takes an amount from the bucket; callers must first get 0 from `retry_s`."""
        self._level -= amount


class DailyBytes:
    """Bounds the bytes that one tenant may take in a UTC day. It is not safe under threads."""

    def __init__(self, most: int) -> None:
        """Starts on no day. `most` is the most bytes of a day."""
        self._most = most
        self._day: int | None = None
        self._taken = 0

    def take(self, num_bytes: int, day: int, taken_before: Callable[[], int]) -> bool:
        """Takes bytes and returns True; returns False and takes nothing if they are more than the day has left.

        Args:
            num_bytes: the bytes to take.
            day: the number of the UTC day since 1970. The day before the newest one counts as the newest: around
                midnight a call that began on it may come late, and must not make that day begin anew.
            taken_before: returns how many bytes were taken on this day before this object was made; asked once.
        """
        if self._day is None or day not in (self._day, self._day - 1):
            self._taken = taken_before() if self._day is None else 0
            self._day = day
        if self._taken + num_bytes > self._most:
            return False
        self._taken += num_bytes
        return True


class SharedRoom:
    """Bounds an amount that all tenants share, such as the bytes in flight. It is safe under threads.

    A tenant may hold at most as much as is still free, so there is always room for another tenant. With a shared amount
    of 12 MB, one tenant alone can hold 6 MB, and each of two tenants can hold 4 MB.

    Source: Choudhury and Hahne, "Dynamic queue length thresholds for shared-memory packet switches" (IEEE/ACM
    Transactions on Networking 6(2), 1998), with a factor of one.
    """

    def __init__(self, size: float) -> None:
        """Starts with nothing held. `size` is the most that all tenants may hold together, but a single larger amount
        may be taken while nothing else is held."""
        self._lock = threading.Lock()
        self._size, self._used = size, 0

    @property
    def most_of_one(self) -> float:
        """Returns how much of the shared amount one tenant can hold with all its requests together, in the unit of
        `size`, while no other tenant holds any of it."""
        return self._size / 2

    def take(self, held: int, amount: int) -> bool:
        """Takes `amount` for a tenant that already holds `held`, and returns True; returns False and takes nothing if
        there is no room for it."""
        with self._lock:
            if self._used and held + amount > self._size - self._used - amount:
                return False
            self._used += amount
            return True

    def give_back(self, amount: int) -> None:
        with self._lock:
            self._used -= amount


class Quota:
    """Holds one tenant's token buckets, and counts the tenant's rows and bytes in flight. It is not safe under
    threads."""

    def __init__(self, limits: TenantLimits, now_s: float, room: SharedRoom | None = None) -> None:
        """Makes the quota of a tenant that has no request in flight.

        Args:
            limits: the operator's limits for this tenant.
            now_s: the present time in seconds.
            room: the bound on the bytes in flight of all tenants together; None sets no bound.
        """
        self.limits = limits
        self._room = room or SharedRoom(math.inf)
        self._rows, self._bytes = TokenBucket(limits.rows_per_s, now_s), TokenBucket(limits.bytes_per_s, now_s)
        self.rows_in_flight = self.bytes_in_flight = 0
        """Rows of requests that were admitted and have not ended, and the bytes of these requests and the
        replies."""

    def admit(self, num_rows: int, num_bytes: int, now_s: float) -> float:
        """Admits a request and returns 0, or refuses it and returns the seconds after which the tenant may retry.

        Args:
            num_rows: the number of rows of the request.
            num_bytes: the bytes of the request and its reply together.
            now_s: the time in seconds, on any clock that does not go back.
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
        """Returns whether a request would exceed the bounds on the tenant's rows or bytes in flight. A request larger
        than a bound is admitted if nothing else is in flight, since it could never be admitted otherwise."""
        rows, most_bytes = self.limits.max_rows_in_flight, self.limits.max_in_flight_bytes
        if rows is not None and self.rows_in_flight > 0 and self.rows_in_flight + num_rows > rows:
            return True
        return most_bytes is not None and self.bytes_in_flight > 0 and self.bytes_in_flight + num_bytes > most_bytes

    def released(self, num_rows: int, num_bytes: int) -> None:
        """Subtracts an ended request's rows and bytes from the amounts in flight."""
        self.rows_in_flight -= num_rows
        self.bytes_in_flight -= num_bytes
        self._room.give_back(num_bytes)
