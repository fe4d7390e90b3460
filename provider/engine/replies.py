"""Puts together the reply to each request from its products, and calls the request's callback.

Guarantees: `done` is called exactly once for each request, or not at all if the request is cancelled. If a request is
invalid, only that request fails; the other requests in its batch succeed. If one callback raises an error, the other
callbacks are still called.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from provider.engine.job import Completed, Job, Outcome, job_of
from provider.engine.products import all_finite
from provider.engine.replica import RETRY_S
from provider.schedule.ticket import Piece, Ticket
from wire.errors import DeadlineExceeded, InvalidTensor, RemoteFault, Unavailable, VeilbaseError
from wire.frame import Arithmetic, Call
from wire.ring.seeded_rows import Rows

_LOGGER = logging.getLogger(__name__)
FAILED = RemoteFault("the provider failed while computing")


class Replies:
    """Finishes requests with a reply or an error. It is safe under threads, since several replicas may compute pieces
    of one request."""

    def __init__(self, completed: Completed | None, unqueue: Callable[[Ticket], None]) -> None:
        """Keeps the callbacks for requests that have ended.

        Args:
            completed: called for every request that gets a reply, fails or is cancelled; None for no callback.
            unqueue: removes the remaining rows of a request that failed or was cancelled from the queue.
        """
        self._completed, self._unqueue = completed, unqueue

    @property
    def are_told(self) -> bool:
        """Returns whether a `completed` callback was given, so that `tell` does something."""
        return self._completed is not None

    def tell(self, tenant: str, call: Call, rows: Rows, reply: torch.Tensor | None) -> None:
        """Calls `completed` for an ended request, if it was given; `reply` is None if the request has no reply."""
        if self._completed is not None:
            self._completed(tenant, call, rows, reply)

    def cancel(self, job: Job) -> bool:
        """Takes a job out of the queue and drops the job's rows; returns False if the job had already ended."""
        self._unqueue(job.ticket)
        rows = job.end()
        if rows is not None:
            self.tell(job.ticket.tenant, job.ticket.call, rows, None)
        return rows is not None

    def is_good(self, piece: Piece, alone: bool) -> bool:
        """Returns whether a piece may be computed in its batch. If not, the request has already ended, or this call
        fails it, because its deadline has passed or because the piece holds a value that is not finite.

        If the piece is `alone` in its batch, its values are not checked here, since they can harm no other request.
        """
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
        """Puts the outcome of one piece into the request's reply, and finishes the request once all pieces are in."""
        try:
            self._deliver(piece, outcome)
        except torch.OutOfMemoryError:
            error = Unavailable("the device has no memory left for this reply", RETRY_S)
            self.fail_all([piece.ticket], error)
        except Exception as exc:  # noqa: BLE001 - the thread serves every tenant and must go on
            _LOGGER.error("a reply could not be given: %s", type(exc).__name__)
            self.fail_all([piece.ticket], FAILED)

    def _deliver(self, piece: Piece, outcome: Outcome) -> None:
        job = job_of(piece.ticket)
        if job.rows is None:
            return  # The request has been cancelled meanwhile.
        if not isinstance(outcome, torch.Tensor):
            self.fail(job, outcome)
            return
        reply = outcome if piece.num_rows == piece.ticket.num_rows else job.place(piece, outcome)
        if reply is not None:
            self.finish(job, reply)

    def finish(self, job: Job, reply: torch.Tensor) -> None:
        """Ends a job and calls the job's `done` with the complete reply; does nothing if the job has already ended."""
        rows = job.end()
        if rows is None:
            return
        try:
            self.tell(job.ticket.tenant, job.ticket.call, rows, reply)
        finally:
            job.done(reply)

    def fail_all(self, tickets: Sequence[Ticket], error: VeilbaseError) -> None:
        """Ends the requests of all these tickets (the scheduler's records of requests) with an error."""
        for ticket in tickets:
            try:
                self.fail(job_of(ticket), error)
            except Exception as exc:  # noqa: BLE001 - the others must be told as well
                _LOGGER.error("a request could not be told that it failed: %s", type(exc).__name__)

    def fail(self, job: Job, error: VeilbaseError) -> None:
        """Ends a job and calls the job's `done` with an error, unless the job has already ended."""
        if self.cancel(job):
            job.done(error)
