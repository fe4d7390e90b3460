"""Defines the job, a request inside the executor: its rows, the finished part of its reply, and its callback."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from provider.schedule.request_class import RequestClass
from provider.schedule.ticket import Piece, Ticket
from wire.errors import VeilbaseError
from wire.frame import Call
from wire.ring.buffers import unwritten_like
from wire.ring.seeded_rows import Rows, SeededRows, count_rows

Outcome = torch.Tensor | VeilbaseError
Completed = Callable[[str, Call, Rows, torch.Tensor | None], None]
"""A callback that is called before a reply is sent, with the tenant's name, the call, all rows of the request, and the
reply, which is None if the request failed or was cancelled."""


class Job:
    """Holds one request inside the executor until its reply is complete."""

    def __init__(
        self,
        call: Call,
        rows: Rows,
        tenant: str,
        request_class: RequestClass,
        expires_at: float,
        done: Callable[[Outcome], None],
        reply_cols: int,
    ) -> None:
        """Makes the job and its ticket (the scheduler's record of the request). The present time counts as the time of
        arrival.

        Args:
            call, rows, tenant, request_class: the product to compute, its rows, the tenant, and the class of work.
            expires_at: the request's deadline, in seconds of `time.monotonic`.
            done: called once with the reply or the error, in any thread; not called if the job is cancelled.
            reply_cols: the number of columns of the reply.
        """
        num_rows = count_rows(rows)
        self.rows: Rows | None = rows
        self.reply: torch.Tensor | None = None
        self._lock = threading.Lock()
        self._placed: dict[int, int] = {}
        """Maps the first row of each piece that was copied into `reply` to the piece's number of rows."""
        self.done, self.reply_cols = done, reply_cols
        self.ticket = Ticket(tenant, call, num_rows, request_class, time.monotonic(), expires_at, job=self)

    def place(self, piece: Piece, part: torch.Tensor) -> torch.Tensor | None:
        """Copies the result of one piece into the reply; several threads may call this at once.

        Returns:
            The whole reply, for the one call that completed it; None for all other calls.
        """
        with self._lock:
            if self.rows is None:
                return None  # The job has already ended.
            if self.reply is None:
                self.reply = unwritten_like(part, self.ticket.num_rows, part.shape[1], part.dtype)
            reply = self.reply
        reply[piece.first_row : piece.first_row + piece.num_rows] = part
        if part.is_cuda:  # The part's memory may be used by another product's stream as soon as it is let go.
            torch.cuda.current_stream(part.device).synchronize()
        with self._lock:
            if piece.first_row in self._placed:  # The piece was computed twice, because a replica was lost.
                return None
            self._placed[piece.first_row] = piece.num_rows
            return reply if sum(self._placed.values()) == self.ticket.num_rows else None

    def end(self) -> Rows | None:
        """Ends the job: drops its rows and its unfinished reply.

        Returns:
            The rows, for the one call that ended the job; None for all other calls.
        """
        with self._lock:
            rows, self.rows, self.reply = self.rows, None, None
            return rows


def job_of(ticket: Ticket) -> Job:
    """Returns the executor's job for a ticket. The ticket represents a request in the scheduler, and the job represents
    the same request in the executor. Raises TypeError if the ticket has no job."""
    job = ticket.job
    if not isinstance(job, Job):
        raise TypeError("a ticket of another executor")
    return job


def rows_of(piece: Piece) -> Rows | None:
    """Returns the rows of one piece of a request, or None if the request has ended, for example by a cancel."""
    rows = job_of(piece.ticket).rows
    if isinstance(rows, SeededRows):
        return SeededRows(rows.seed, rows.first_row + piece.first_row, piece.num_rows)
    return None if rows is None else rows[piece.first_row : piece.first_row + piece.num_rows]
