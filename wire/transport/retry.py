"""Sends a refused request again once the provider allows it: it came too early, or a shard is being restored
(wire/SPEC.md, section 6).

Guarantees: what is sent again is the same payload, so the same bytes, and a mask's slot is not used for other
rows; it is never sent before the time that the provider named; retries are bounded in number and in time, so that a
provider cannot hold a tenant for ever. A request on a stream that broke is not sent again: that decision belongs to the
code that owns the masks.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

import torch

from wire.errors import QuotaExceeded, Unavailable
from wire.frame import Call
from wire.limits import MAX_RETRY_S
from wire.payload import Payload

if TYPE_CHECKING:
    from wire.transport.multiplexer import Multiplexer

MAX_WAIT_S = 600.0
"""Most seconds between a request's first refusal and its last retry."""
_FIRST_FLOOR_S, _LAST_FLOOR_S = 0.01, 2.0
"""Least seconds to wait before the first retry, and what this grows to: it doubles with every retry, so that a provider
that names a short time again and again costs few sends."""
_JITTER = 0.25
"""Largest random addition, as a share of the time named, so that tenants that were refused together do not come back
together."""


class RetriedRequest:
    """A `Pending` that waits and sends again in the thread that asks for the result."""

    __slots__ = ("_call", "_payload", "_reply_cols", "_request", "_stream")

    def __init__(self, stream: Multiplexer, call: Call, payload: Payload, reply_cols: int) -> None:
        """Sends the request a first time; see `Multiplexer.submit` for arguments and errors."""
        self._stream, self._call, self._payload, self._reply_cols = stream, call, payload, reply_cols
        self._request = stream.submit(call, payload, reply_cols)

    def result(self) -> torch.Tensor:
        """Does what `Pending.result` says; raises `QuotaExceeded` or `Unavailable` where waiting does not help."""
        give_up_at, floor_s = float("inf"), _FIRST_FLOOR_S
        while True:
            try:
                return self._request.result()
            except (QuotaExceeded, Unavailable) as exc:
                now = time.monotonic()
                give_up_at = min(give_up_at, now + MAX_WAIT_S)
                wait_s = with_jitter(max(floor_s, exc.retry_s))
                is_over = self._stream.failure is not None or now + wait_s > give_up_at
                if is_over or not 0 < exc.retry_s <= MAX_RETRY_S:
                    raise
            time.sleep(wait_s)
            floor_s = min(2 * floor_s, _LAST_FLOOR_S)
            self._request = self._stream.submit(self._call, self._payload, self._reply_cols)


def with_jitter(retry_s: float) -> float:
    """Returns the seconds to wait: never less than the provider named, and up to a quarter more."""
    return retry_s * (1 + _JITTER * secrets.randbelow(1 << 16) / (1 << 16))
