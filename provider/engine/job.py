"""A request on its way through the executor: its rows, where its reply grows, and who is to have it."""

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
"""Tenant, call, the whole request and its reply, before the reply leaves; None where there is none and will be none."""


class Job:
    """One request on its way through the executor."""

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
        """Args.

        expires_at: on the clock of `time.monotonic`.
        done: takes the reply or the error, in the worker.
        reply_cols: numbers in a row of the reply.
        """
        num_rows = count_rows(rows)
        self.rows: Rows | None = rows
        self.reply: torch.Tensor | None = None
        self._lock = threading.Lock()
        self._placed: dict[int, int] = {}
        """Of a request in pieces: the first row of each that is in `reply`, and how many rows it has."""
        self.done, self.reply_cols = done, reply_cols
        self.ticket = Ticket(tenant, call, num_rows, request_class, time.monotonic(), expires_at, job=self)

    def place(self, piece: Piece, part: torch.Tensor) -> torch.Tensor | None:
        """Puts a piece's part of the reply in its place; safe under threads.

        Returns:
            The reply, to the one caller who made it whole.
        """
        with self._lock:
            if self.rows is None:
                return None  # it has ended
            if self.reply is None:
                self.reply = unwritten_tensor(self.ticket.num_rows, part.shape[1], part.dtype)
            reply = self.reply
        reply[piece.first_row : piece.first_row + piece.num_rows] = part
        with self._lock:
            if piece.first_row in self._placed:  # made again after a loss
                return None
            self._placed[piece.first_row] = piece.num_rows
            return reply if sum(self._placed.values()) == self.ticket.num_rows else None

    def end(self) -> Rows | None:
        """Lets go of the rows, and of what there is of the reply.

        Returns:
            The rows, to the one caller who ended the job.
        """
        with self._lock:
            rows, self.rows, self.reply = self.rows, None, None
            return rows


def job_of(ticket: Ticket) -> Job:
    """The job that a ticket stands for."""
    job = ticket.job
    if not isinstance(job, Job):
        raise TypeError("a ticket of another executor")
    return job


def rows_of(piece: Piece) -> Rows | None:
    """The piece's rows; None where the request was cancelled."""
    rows = job_of(piece.ticket).rows
    if isinstance(rows, SeededRows):
        return SeededRows(rows.seed, rows.first_row + piece.first_row, piece.num_rows)
    return None if rows is None else rows[piece.first_row : piece.first_row + piece.num_rows]
