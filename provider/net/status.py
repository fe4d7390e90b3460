"""Describes the state of streams at one time, for the log, for metrics and for tests: counts, bytes and callers' names.

Guarantees: a status is a copy that does not change. Making a status delays a stream's thread only while a few numbers
are read. The numbers may be from slightly different times, since the streams continue meanwhile.

Threads: any thread may use this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class SessionStatus:
    """Describes the present state of one stream.

    Attributes:
        num_requests: number of requests in flight, except single rows that the receiving thread computes at once.
        held_bytes: bytes of these requests and their replies.
        num_waiting: number of frames and replies that wait to be sent.
        num_half_sent: number of large replies of which some chunks have been sent.
        is_idle: whether no request is in flight.
        has_greeted: whether the tenant has sent its HELLO.
        is_draining: whether new requests are refused.
        is_closed: whether the session has ended, so that it takes no more messages.
        is_over: whether no further frame will be sent.
    """

    num_requests: int
    held_bytes: int
    num_waiting: int
    num_half_sent: int
    is_idle: bool
    has_greeted: bool
    is_draining: bool
    is_closed: bool
    is_over: bool


@dataclass(frozen=True)
class ServiceStatus:
    """Describes all streams of a provider.

    Attributes:
        num_streams: number of open streams.
        num_tenants: number of tenants with an open stream.
        num_unanswered: number of streams with a request in flight.
        num_requests, held_bytes, num_waiting: sums over all streams; see `SessionStatus`.
        num_rows: rows in flight of all tenants with an open stream, including rows that the receiving thread computes.
        calls: by caller's name, the number of open streams and downloads; only callers with at least one.
        is_draining: whether new streams and requests are refused.
    """

    num_streams: int
    num_tenants: int
    num_unanswered: int
    num_requests: int
    num_rows: int
    held_bytes: int
    num_waiting: int
    calls: Mapping[str, int]
    is_draining: bool
