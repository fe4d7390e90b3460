"""This module sends a refused request again once the provider allows it. A provider names a waiting time if the
tenant has sent too much at once, and while something is missing that may come back, such as a lost shard
(wire/SPEC.md, section 6).

Guarantees: a retry sends the same payload and so the same bytes, and never uses a mask's slot (one row of a mask) for
other rows. A retry is never sent before the time that the provider named. Retries are bounded in number and in time, so
that a provider cannot hold a tenant for ever. A request on a broken stream is not sent again: the code that owns the
masks must decide that.
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
"""The most seconds between a request's first refusal and its last retry."""
_FIRST_FLOOR_S, _LAST_FLOOR_S = 0.01, 2.0
"""The shortest wait in seconds before the first retry, and the largest value that this bound grows to. The bound
doubles with every retry, so that a provider that names a short time again and again causes few sends."""
_JITTER = 0.25
"""The largest random addition to a wait, as a share of the wait, so that tenants that were refused together do not
retry together."""


class RetriedRequest:
    """Implements `Pending` (wire/transport/connection.py): the thread that calls `result` waits and retries."""

    __slots__ = ("_call", "_payload", "_reply_cols", "_request", "_stream")

    def __init__(self, stream: Multiplexer, call: Call, payload: Payload, reply_cols: int) -> None:
        """Sends the request a first time; see `Multiplexer.submit` for arguments and errors."""
        self._stream, self._call, self._payload, self._reply_cols = stream, call, payload, reply_cols
        self._request = stream.submit(call, payload, reply_cols)

    def result(self) -> torch.Tensor:
        """Returns the reply; see `Pending.result`. Raises the refusal, `QuotaExceeded` or `Unavailable`, if it names no
        time or more than `MAX_RETRY_S`, if retries would take longer than `MAX_WAIT_S`, or if the stream has broken."""
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
    """Returns `retry_s` seconds plus a random share of up to a quarter of them."""
    return retry_s * (1 + _JITTER * secrets.randbelow(1 << 16) / (1 << 16))
