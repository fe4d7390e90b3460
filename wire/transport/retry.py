"""This module decides when a refused request is sent again; `Request` (wire/transport/multiplexer.py) sends it. A
provider names a waiting time if the tenant has sent too much at once, and while something is missing that may come
back, such as a lost shard (wire/SPEC.md, section 6).

Guarantees: no retry comes before the time that the provider named. Retries are bounded in number and in time, so that
a provider cannot hold a tenant for ever.
"""

from __future__ import annotations

import secrets
import time

from wire.errors import QuotaExceeded, Unavailable
from wire.limits import MAX_RETRY_S

MAX_WAIT_S = 600.0
"""The most seconds between a request's first refusal and its last retry."""
_FIRST_FLOOR_S, _LAST_FLOOR_S = 0.01, 2.0
"""The shortest wait in seconds before the first retry, and the largest value that this bound grows to. The bound
doubles with every retry, so that a provider that names a short time again and again causes few sends."""
_JITTER = 0.25
"""The largest random addition to a wait, as a share of the wait, so that tenants that were refused together do not
retry together."""


class Retries:
    """Decides how long one request waits after each refusal before it is sent again, and whether it is."""

    def __init__(self) -> None:
        """Begins with a request that was refused for the first time just now."""
        self._give_up_at_s, self._floor_s = time.monotonic() + MAX_WAIT_S, _FIRST_FLOOR_S

    def wait(self, refusal: QuotaExceeded | Unavailable) -> bool:
        """Waits until the request may be sent again.

        Returns:
            False, without a wait, if the refusal is final: it names no time or more than `MAX_RETRY_S`, or retries
            would take longer than `MAX_WAIT_S`.
        """
        wait_s = with_jitter(max(self._floor_s, refusal.retry_s))
        if time.monotonic() + wait_s > self._give_up_at_s or not 0 < refusal.retry_s <= MAX_RETRY_S:
            return False
        time.sleep(wait_s)
        self._floor_s = min(2 * self._floor_s, _LAST_FLOOR_S)
        return True


def with_jitter(retry_s: float) -> float:
    """Returns `retry_s` seconds plus a random share of up to a quarter of them."""
    return retry_s * (1 + _JITTER * secrets.randbelow(1 << 16) / (1 << 16))
