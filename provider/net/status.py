"""What streams hold at one moment, for the log, for metrics and for tests: counts, bytes and callers' names.

Guarantees: a status is a copy that does not change; making one keeps a stream's thread up for no longer than it takes
to read a few numbers. It does not guarantee that its numbers are of exactly one moment, since streams go on meanwhile.

Threads: any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class SessionStatus:
    """One stream.

    Attributes:
        num_requests: requests in flight. A row that is answered where it is read is not among them.
        held_bytes: what those requests and their replies take.
        num_waiting: frames and replies that wait to be sent.
        num_half_sent: large replies of which some chunks have been sent.
        is_idle: every request has been answered, and its answer is queued or sent.
        has_greeted: the tenant has sent its HELLO.
        is_draining: new requests are refused.
        is_closed: the session has ended, and takes nothing more.
        is_over: there will be no further frame to send.
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
    """All streams of a provider.

    Attributes:
        num_streams: streams that are open.
        num_tenants: tenants that have one.
        num_unanswered: streams with a request that is not answered.
        num_requests, held_bytes, num_waiting: see `SessionStatus`; of all streams together.
        num_rows: rows in flight of those tenants, as their quotas count them: with rows that are answered where they
            are read.
        calls: how many streams, downloads and visits each caller has open, without those that have none.
        num_joining: hosts of shards on their way in.
        is_draining: new streams and requests are refused.
    """

    num_streams: int
    num_tenants: int
    num_unanswered: int
    num_requests: int
    num_rows: int
    held_bytes: int
    num_waiting: int
    calls: Mapping[str, int]
    num_joining: int
    is_draining: bool
