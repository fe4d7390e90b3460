"""Answers each request once its products are made: replies are put together, and every callback is called once.

Guarantees: a request ends by exactly one call of `done`, or by none once it is cancelled; a fault of one request is
that request's alone, whichever requests shared its product; a callback that fails keeps no other from being called.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from provider.engine.job import Completed, Job, Outcome, job_of
from provider.engine.products import all_finite
from provider.schedule.ticket import Piece, Ticket
from wire.errors import DeadlineExceeded, InvalidTensor, RemoteFault, VeilbaseError
from wire.frame import Arithmetic, Call
from wire.ring.seeded_rows import Rows

_LOGGER = logging.getLogger(__name__)
FAILED = RemoteFault("the provider failed while computing")


class Replies:
    """Answers requests. It is safe under threads: several replicas may have pieces of one request."""

    def __init__(self, completed: Completed | None, unqueue: Callable[[Ticket], None]) -> None:
        """Keeps the callbacks.

        Args:
            completed: called for every request when it is answered with a tensor, or fails or is cancelled; may be
                None.
            unqueue: drops what is left of a request that will not be answered.
        """
        self._completed, self._unqueue = completed, unqueue

    @property
    def are_told(self) -> bool:
        """Tells whether there is a callback for every request."""
        return self._completed is not None

    def tell(self, tenant: str, call: Call, rows: Rows, reply: torch.Tensor | None) -> None:
        """Reports a request that has no job, with its reply, or None where it was answered with an error."""
        if self._completed is not None:
            self._completed(tenant, call, rows, reply)

    def cancel(self, job: Job) -> bool:
        """Takes a job out of the queue, and drops its rows; returns False where it was over already."""
        self._unqueue(job.ticket)
        rows = job.end()
        if rows is not None:
            self.tell(job.ticket.tenant, job.ticket.call, rows, None)
        return rows is not None

    def is_good(self, piece: Piece, alone: bool) -> bool:
        """Tells whether a piece may be computed with others; one that may not has been answered."""
        job = job_of(piece.ticket)
        rows = job.rows
        if rows is None:
            return False
        if time.monotonic() >= piece.ticket.expires_s:
            self.fail(job, DeadlineExceeded("the request waited in the queue beyond its deadline"))
            return False
        if alone or not isinstance(rows, torch.Tensor) or piece.ticket.call.arithmetic is Arithmetic.RING:
            return True
        if all_finite(rows[piece.first_row : piece.first_row + piece.num_rows]):
            return True
        self.fail(job, InvalidTensor("a row holds NaN or infinity"))
        return False

    def deliver(self, piece: Piece, outcome: Outcome) -> None:
        """Puts a piece's part of a product in its place, and answers the request if it is complete."""
        try:
            self._deliver(piece, outcome)
        except Exception as exc:  # noqa: BLE001 - the thread serves every tenant and must go on
            _LOGGER.error("a reply could not be given: %s", type(exc).__name__)
            self.fail_all([piece.ticket], FAILED)

    def _deliver(self, piece: Piece, outcome: Outcome) -> None:
        job = job_of(piece.ticket)
        if job.rows is None:
            return  # The request was cancelled meanwhile.
        if not isinstance(outcome, torch.Tensor):
            self.fail(job, outcome)
            return
        reply = outcome if piece.num_rows == piece.ticket.num_rows else job.place(piece, outcome)
        if reply is not None:
            self.finish(job, reply)

    def finish(self, job: Job, reply: torch.Tensor) -> None:
        """Answers a job with the whole reply to its rows."""
        rows = job.end()
        if rows is None:
            return
        try:
            self.tell(job.ticket.tenant, job.ticket.call, rows, reply)
        finally:
            job.done(reply)

    def fail_all(self, tickets: Sequence[Ticket], error: VeilbaseError) -> None:
        """Calls `fail` for the job of each ticket."""
        for ticket in tickets:
            try:
                self.fail(job_of(ticket), error)
            except Exception as exc:  # noqa: BLE001 - the others must be answered as well
                _LOGGER.error("a request could not be told that it failed: %s", type(exc).__name__)

    def fail(self, job: Job, error: VeilbaseError) -> None:
        """Answers with an error a job that was neither answered nor cancelled."""
        if self.cancel(job):
            job.done(error)
