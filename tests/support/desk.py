"""Stands in for an executor behind a session."""

from __future__ import annotations

from provider.engine.request import Outcome, Request
from wire.errors import VeilbaseError
from wire.frame import Call
from wire.ring.seeded_rows import Rows


class Desk:
    """Stands in for an executor: it queues every request, and replies to rows as the test sets."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.cancelled: list[Request] = []
        self.here: Outcome | None = None
        """The outcome of small requests, which the reading thread computes itself. None means that they are queued
        instead."""
        self.row: VeilbaseError | bool = True
        self.num_rows = 0

    def submit(self, request: Request) -> None:
        """Keeps a request."""
        self.requests.append(request)

    def cancel(self, request: Request) -> None:
        """Keeps a request that is cancelled."""
        self.cancelled.append(request)

    def compute_here(self, tenant: str, call: Call, rows: Rows) -> Outcome | None:
        """Returns what the test has set."""
        return self.here

    def compute_row(self, tenant: str, call: Call, row: memoryview, reply: memoryview) -> VeilbaseError | bool:
        """Writes bytes that count up, and returns what the test has set."""
        self.num_rows += 1
        reply[:] = bytes(range(len(reply)))
        return self.row
