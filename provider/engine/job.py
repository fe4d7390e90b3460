"""A request inside the executor: its rows, the part of its reply that is there, and the callback that gets it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from provider.schedule.request_class import RequestClass
from provider.schedule.ticket import Piece, Ticket
from wire.errors import VeilbaseError
from wire.frame import Call
from wire.ring.buffers import unwritten_tensor
from wire.ring.seeded_rows import Rows, SeededRows, count_rows

Outcome = torch.Tensor | VeilbaseError
Completed = Callable[[str, Call, Rows, torch.Tensor | None], None]
"""Called with tenant, call, the whole request and its reply, before the reply is sent; None where there will be no
reply."""


class Job:
    """One request inside the executor."""

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
        """Makes the job and its ticket, which arrives now.

        Args:
            call, rows, tenant, request_class: the request.
            expires_at: its deadline on the clock of `time.monotonic`.
            done: takes the reply or the error, in the worker.
            reply_cols: how many numbers a row of the reply has.
        """
        num_rows = count_rows(rows)
        self.rows: Rows | None = rows
        self.reply: torch.Tensor | None = None
        self._lock = threading.Lock()
        self._placed: dict[int, int] = {}
        """For a request in pieces: the first row of each piece that is in `reply`, and how many rows the piece has."""
        self.done, self.reply_cols = done, reply_cols
        self.ticket = Ticket(tenant, call, num_rows, request_class, time.monotonic(), expires_at, job=self)

    def place(self, piece: Piece, part: torch.Tensor) -> torch.Tensor | None:
        """Puts a piece's part of the reply in its place; this is safe under threads.

        Returns:
            The reply, to the one caller that completed it; None to all others.
        """
        with self._lock:
            if self.rows is None:
                return None  # The job has ended.
            if self.reply is None:
                self.reply = unwritten_tensor(self.ticket.num_rows, part.shape[1], part.dtype)
            reply = self.reply
        reply[piece.first_row : piece.first_row + piece.num_rows] = part
        with self._lock:
            if piece.first_row in self._placed:  # The piece was made again after a loss.
                return None
            self._placed[piece.first_row] = piece.num_rows
            return reply if sum(self._placed.values()) == self.ticket.num_rows else None

    def end(self) -> Rows | None:
        """Drops the rows, and what there is of the reply.

        Returns:
            The rows, to the one caller that ended the job; None to all others.
        """
        with self._lock:
            rows, self.rows, self.reply = self.rows, None, None
            return rows


def job_of(ticket: Ticket) -> Job:
    """Returns the job that a ticket stands for."""
    job = ticket.job
    if not isinstance(job, Job):
        raise TypeError("a ticket of another executor")
    return job


def rows_of(piece: Piece) -> Rows | None:
    """Returns the piece's rows; None where the request was cancelled."""
    rows = job_of(piece.ticket).rows
    if isinstance(rows, SeededRows):
        return SeededRows(rows.seed, rows.first_row + piece.first_row, piece.num_rows)
    return None if rows is None else rows[piece.first_row : piece.first_row + piece.num_rows]
