"""Lists what the streams of tenants need from whatever computes their requests."""

from __future__ import annotations

from typing import Protocol

from provider.engine.job import Job, Outcome
from wire.errors import VeilbaseError
from wire.frame import Call
from wire.ring.seeded_rows import Rows


class Computes(Protocol):
    """Lists the methods that a session calls to have requests computed, by one executor or by several."""

    def submit(self, job: Job) -> None:
        """Queues a job; `provider.engine.executor.Executor` describes this method and the methods below."""
        ...

    def compute_here(self, tenant: str, call: Call, rows: Rows) -> Outcome | None: ...

    def compute_row(self, tenant: str, call: Call, row: memoryview, reply: memoryview) -> VeilbaseError | bool: ...

    def cancel(self, job: Job) -> None: ...
