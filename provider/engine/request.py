"""Holds a request of a tenant from its first frame until its reply is sent. There is one object for one request: the
stream's table, the executor and the outbox pass it on, and the scheduler sees its `ticket` alone.

    provider/net/session.py        checks the header, makes the request
    provider/net/requests.py       takes it into the table; `assembler` joins its chunks
    provider/net/session.py        `complete` takes its rows, and makes the ticket
    provider/engine/executor.py    queues it, and computes it in pieces
    provider/schedule/             decides on the ticket: a `Piece` is some of its rows, a `Batch` one product's pieces
    provider/engine/executor.py    `place` joins the pieces' results, `end` drops the rows, `done` hands the outcome on
    provider/net/requests.py       `reply` waits in the outbox until the tenant reads

Guarantees: the rows and what is finished of the reply are dropped by `end`, which only one thread gets them from, so a
request is answered at most once. Not guaranteed: that `done` is called; the executor sees to that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from provider.schedule.ticket import Piece, RequestClass, Ticket
from wire import frame
from wire.errors import VeilbaseError
from wire.frame import Assembler, FrameType, Header
from wire.gpu_window.memory import Area
from wire.ring.buffers import unwritten_like
from wire.ring.seeded_rows import Rows, SeededRows

Outcome = torch.Tensor | VeilbaseError


class Request:
    """Holds one request, in the order of its life: its header, then its chunks, its rows, and its reply."""

    ticket: Ticket
    """The scheduler's record of the request; there is none before `complete`. Its class may change in the queue, if the
    tenant floods; `request_class` stays what the quota was charged for."""

    def __init__(
        self,
        tenant: str,
        header: Header,
        reply_cols: int,
        request_class: RequestClass,
        expires_s: float,
        done: Callable[[Request, Outcome], None],
        area: Area | None = None,
    ) -> None:
        """Makes a request of which no chunk has been received yet.

        Args:
            tenant: the name of the tenant that pays for the request.
            header: the header of the request's first frame.
            reply_cols: the number of columns of the reply.
            request_class: the class that the request counts as.
            expires_s: the deadline, in seconds of `time.monotonic`.
            done: called once with the request and its reply or error, in any thread; not called if the request is
                cancelled.
            area: the request's place in the stream's window; None if its rows come in frames.
        """
        self.tenant, self.header, self.reply_cols = tenant, header, reply_cols
        self.request_class, self.expires_s, self.area = request_class, expires_s, area
        self.reply_bytes = frame.payload_bytes(FrameType.REPLY, header.call, header.rows, reply_cols)
        """The bytes of the reply on the wire."""
        self.held_bytes = frame.held_bytes(header.call, header.rows, header.cols, reply_cols)
        """The bytes of the request and its reply together, as limits count them."""
        self.assembler: Assembler | None = Assembler(header)
        """Joins the request's chunks into rows; None once all chunks are received."""
        self.rows: Rows | None = None
        """The rows while the request is queued or computed; None before `complete` and after `end`."""
        self.reply: torch.Tensor | None = None
        """The whole reply while it waits to be sent."""
        self.is_reply_begun = False
        """True once the tenant may have a part of the reply; `RequestTable.begin_reply` sets it."""
        self._done = done

    def complete(self, rows: Rows) -> None:
        """Takes the rows, which have all been received, and makes the ticket, so that the request can be queued. The
        present time counts as the time of arrival."""
        header = self.header
        # A small request that is computed where it is received needs none of this, and should not wait for it.
        self._lock = threading.Lock()
        self._unfinished: torch.Tensor | None = None
        self._placed: dict[int, int] = {}
        """Maps the first row of each piece that was copied into `_unfinished` to the piece's number of rows."""
        self.ticket = Ticket(
            self.tenant,
            header.call.product,
            header.rows,
            self.request_class,
            time.monotonic(),
            self.expires_s,
            request=self,
        )
        self.rows = rows  # A thread that finds rows may cancel the request, so the ticket comes first.

    def rows_of(self, piece: Piece) -> Rows | None:
        """Returns the rows of one piece, or None if the request has ended, for example by a cancel."""
        rows = self.rows
        if isinstance(rows, SeededRows):
            return SeededRows(rows.seed, rows.first_row + piece.first_row, piece.num_rows)
        return None if rows is None else rows[piece.first_row : piece.first_row + piece.num_rows]

    def place(self, piece: Piece, part: torch.Tensor) -> torch.Tensor | None:
        """Copies the result of one piece into the reply; several threads may call this at once.

        Returns:
            The whole reply, for the one call that completed it; None for all other calls.
        """
        num_rows = self.header.rows
        with self._lock:
            if self.rows is None:
                return None  # The request has already ended.
            if self._unfinished is None:
                self._unfinished = unwritten_like(part, num_rows, part.shape[1], part.dtype)
            reply = self._unfinished
        reply[piece.first_row : piece.first_row + piece.num_rows] = part
        if part.is_cuda:  # The part's memory may be used by another product's stream as soon as it is let go.
            torch.cuda.current_stream(part.device).synchronize()
        with self._lock:
            if piece.first_row in self._placed:  # The piece was computed twice, because a replica was lost.
                return None
            self._placed[piece.first_row] = piece.num_rows
            return reply if sum(self._placed.values()) == num_rows else None

    def end(self) -> Rows | None:
        """Ends the request in the executor: drops its rows and its unfinished reply.

        Returns:
            The rows, for the one call that ended the request; None for all other calls.
        """
        with self._lock:
            rows, self.rows, self._unfinished = self.rows, None, None
            return rows

    def done(self, outcome: Outcome) -> None:
        """Hands the reply or the error to whoever made the request; callers must first end the request."""
        self._done(self, outcome)


def request_of(ticket: Ticket) -> Request:
    """Returns the request that a ticket stands for in the scheduler. Raises TypeError if it stands for none."""
    request = ticket.request
    if not isinstance(request, Request):
        raise TypeError("a ticket of another executor")
    return request
