"""A request that comes again when the provider says when it may: it came too early, or a shard is being brought back
(SPEC.md, section 6).

Guarantees: what is sent again is the same tensor or seed, so the same bytes: a mask's slot is not used for other rows;
never before the time that the provider named; bounded in number and in time, so that a provider cannot hold a tenant
for ever. A stream that broke is not tried again: that is for whoever owns the masks.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

import torch

from wire.errors import QuotaExceeded, Unavailable
from wire.frame import Call
from wire.limits import MAX_RETRY_S
from wire.ring.seeded_rows import Rows

if TYPE_CHECKING:
    from wire.transport.multiplexer import Multiplexer

MAX_WAIT_S = 600.0
"""From a request's first refusal to its last try."""
_FIRST_FLOOR_S, _LAST_FLOOR_S = 0.01, 2.0
"""Doubles with every try: a provider that names a moment again and again costs few sendings."""
_JITTER = 0.25
"""Of the time named; tenants that were refused together do not come back together."""


class RetriedRequest:
    """A `Pending`; waits and sends in the thread that asks for the result."""

    __slots__ = ("_call", "_cols", "_reply_cols", "_request", "_rows", "_stream")

    def __init__(self, stream: Multiplexer, call: Call, rows: Rows | bytearray, cols: int, reply_cols: int) -> None:
        """Sends the request a first time; see `Multiplexer.submit` for arguments and errors."""
        self._stream, self._call, self._rows, self._cols, self._reply_cols = stream, call, rows, cols, reply_cols
        self._request = stream.submit(call, rows, cols, reply_cols)

    def result(self) -> torch.Tensor:
        """See `Pending.result`; raises `QuotaExceeded`, `Unavailable` where waiting does not help."""
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
            self._request = self._stream.submit(self._call, self._rows, self._cols, self._reply_cols)


def with_jitter(retry_s: float) -> float:
    """Seconds to wait: never less than was named, and up to a quarter more."""
    return retry_s * (1 + _JITTER * secrets.randbelow(1 << 16) / (1 << 16))
