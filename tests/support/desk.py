"""Stands in for an executor behind a session."""

from __future__ import annotations

from provider.engine.executor import Job, Outcome
from wire.errors import VeilbaseError
from wire.frame import Call
from wire.ring.seeded_rows import Rows


class Desk:
    """Stands in for an executor: it queues every job, and replies to rows as the test sets."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.cancelled: list[Job] = []
        self.here: Outcome | None = None
        """The outcome of small requests, which the reading thread computes itself. None means that they are queued
        instead."""
        self.row: VeilbaseError | bool = True
        self.num_rows = 0

    def submit(self, job: Job) -> None:
        """Keeps a job."""
        self.jobs.append(job)

    def cancel(self, job: Job) -> None:
        """Keeps a job that is cancelled."""
        self.cancelled.append(job)

    def compute_here(self, tenant: str, call: Call, rows: Rows) -> Outcome | None:
        """Returns what the test has set."""
        return self.here

    def compute_row(self, tenant: str, call: Call, row: memoryview, reply: memoryview) -> VeilbaseError | bool:
        """Writes bytes that count up, and returns what the test has set."""
        self.num_rows += 1
        reply[:] = bytes(range(len(reply)))
        return self.row
