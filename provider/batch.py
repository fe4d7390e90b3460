"""The thread that makes products: takes batches from the scheduler, gathers rows, and gives each request its reply.

Guarantees: a request ends by exactly one call of `done`, or by none once it is cancelled; a fault of one request is
that request's alone, whoever shared its product; a reply owns its memory, so that a tenant who does not read holds
nobody else's. In ring arithmetic a reply does not depend on what shared its batch; in float it does within rounding,
since a matrix product of another height may add in another order.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import torch

from provider.executor import all_finite
from provider.operations.meter import Meter
from provider.schedule.request_class import RequestClass
from provider.schedule.scheduler import Scheduler
from provider.schedule.ticket import Batch, Piece, Ticket
from provider.threads import use_one_core
from wire.errors import DeadlineExceeded, InvalidTensor, RemoteFault, VeilbaseError
from wire.expand import Rows, SeededRows
from wire.frame import Arithmetic, Call

_LOGGER = logging.getLogger(__name__)
Outcome = torch.Tensor | VeilbaseError
Product = Callable[[Call, Rows], torch.Tensor]
"""Raises nothing but `wire.errors`."""
Completed = Callable[[str, Call, Rows, torch.Tensor], None]
"""Tenant, call, the whole request and its reply, before the reply leaves."""


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
    ) -> None:
        """Args: expires_at: on the clock of `time.monotonic`; done: takes the reply or the error, in the worker."""
        num_rows = rows.num_rows if isinstance(rows, SeededRows) else rows.shape[0]
        self.rows: Rows | None = rows
        self.reply: torch.Tensor | None = None
        self.done = done
        self.ticket = Ticket(tenant, call, num_rows, request_class, time.monotonic(), expires_at, job=self)

    def drop(self) -> None:
        """Lets go of the rows: what a running batch still holds of them has been copied."""
        self.rows = self.reply = None


class Executor:
    """One thread that computes; requests small enough may be computed by who brings them, while nothing waits."""

    def __init__(
        self,
        product: Product,
        scheduler: Scheduler,
        completed: Completed | None = None,
        meter: Meter | None = None,
        charge: Callable[[str, float], None] = lambda tenant, seconds: None,
    ) -> None:
        """Args.

        product: makes one.
        scheduler: says which; used under this object's lock alone.
        completed: told of every request that was answered with a tensor.
        meter: told of every product.
        charge: told a tenant's share of every product's seconds.
        """
        self._product, self._scheduler, self._completed = product, scheduler, completed
        self._meter, self._charge = meter or Meter(), charge
        self._changed = threading.Condition()
        self._is_closed = self._is_busy = False  # busy: with one product, in whichever thread
        self._thread = threading.Thread(target=self._run, name="veilbase-compute", daemon=True)
        self._thread.start()

    # ---- in -------------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queues a job."""
        if job.ticket.num_rows == 0:
            rows = job.rows  # once: whoever cancels the job takes them
            if rows is not None:
                self._compute_piece(Piece(job.ticket, 0, 0), rows)
            return
        with self._changed:
            self._scheduler.add(job.ticket, time.monotonic())
            self._changed.notify()

    def compute_here(self, tenant: str, call: Call, rows: Rows) -> Outcome | None:
        """The reply to a small request, made in the calling thread on one core; None where it should be queued instead.

        No job is made for it: a decode step is a hundred such calls, and each pays for every object.
        """
        if self._is_busy:
            return None  # looked at without the lock first: what is chosen wrongly is queued, and answered all the same
        with self._changed:
            if self._is_busy or not self._scheduler.would_take_decode:
                return None
            self._is_busy = True
        began_s = time.monotonic()
        try:
            use_one_core()
            reply = self._product(call, rows)
        except VeilbaseError as exc:
            return exc
        finally:
            self._done_here(tenant, call, began_s)
        if self._completed is not None:
            self._completed(tenant, call, rows, reply)
        return reply

    def _done_here(self, tenant: str, call: Call, began_s: float) -> None:
        now_s = time.monotonic()
        with self._changed:
            self._is_busy = False
            self._scheduler.computed_elsewhere(tenant, call, began_s, now_s)
            if self._scheduler:
                self._changed.notify()
        self._meter.inline(now_s - began_s)
        self._charge(tenant, now_s - began_s)

    def cancel(self, job: Job) -> None:
        """Takes a job out of the queue, and drops its rows."""
        with self._changed:
            self._scheduler.cancel(job.ticket)
        job.drop()

    def __len__(self) -> int:
        """Requests that wait."""
        with self._changed:
            return len(self._scheduler)

    def close(self) -> None:
        """Ends the thread after the batch that it is on."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout=30.0)

    # ---- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closed:
            try:
                batch = self._next_batch()
                if batch is not None:
                    self._run_batch(batch)
            except Exception as exc:  # noqa: BLE001 - the thread serves every tenant and must go on
                _LOGGER.error("the scheduler failed, and its queue is answered with errors: %s", type(exc).__name__)
                with self._changed:
                    left = self._scheduler.abandon()
                self._fail_all(left)
            batch = None  # or the last reply's memory would be held until the next request

    def _run_batch(self, batch: Batch) -> None:
        began_s, began = time.monotonic(), time.perf_counter()
        computed: list[Piece] = []
        is_whole = False
        try:
            is_whole = self._compute(batch, computed)
        except Exception as exc:  # noqa: BLE001 - as above
            _LOGGER.error("a batch failed: %s", type(exc).__name__)
            self._fail_all([piece.ticket for piece in batch.pieces])
        seconds = time.perf_counter() - began
        with self._changed:
            self._is_busy = False
            if is_whole:
                self._scheduler.computed(batch, seconds)
            self._scheduler.finished(batch, time.monotonic())
        self._meter.batch(batch, began_s, seconds)
        num_rows = sum(piece.num_rows for piece in computed)
        for piece in computed:
            self._charge(piece.ticket.tenant, seconds * piece.num_rows / num_rows)

    def _next_batch(self) -> Batch | None:
        with self._changed:
            while not self._is_closed:
                now = time.monotonic()
                batch = None if self._is_busy else self._scheduler.next_batch(now)
                if batch is not None:
                    self._is_busy = True
                    return batch
                due = None if self._is_busy else self._scheduler.next_due_s()
                self._changed.wait(None if due is None else max(0.0, due - now))
        return None

    def _compute(self, batch: Batch, computed: list[Piece]) -> bool:
        """Whether every row was multiplied, once: only then is the time taken for a measurement.

        Args:
            computed: takes the pieces that time was spent on.
        """
        pieces = [piece for piece in batch.pieces if self._is_good(piece, alone=len(batch.pieces) == 1)]
        parts = [(piece, rows) for piece in pieces if (rows := _rows_of(piece)) is not None]
        computed += [piece for piece, _ in parts]
        if not parts:
            return False
        if len(parts) == 1:
            return self._compute_piece(*parts[0]) and len(batch.pieces) == 1
        try:
            replies = self._product(
                batch.call, torch.cat([rows for _, rows in parts if isinstance(rows, torch.Tensor)])
            )
        except VeilbaseError:
            for piece, rows in parts:  # whose fault it was shows when each runs alone
                self._compute_piece(piece, rows)
            return False
        start = 0
        for piece, _ in parts:
            self._deliver(piece, replies[start : start + piece.num_rows], is_shared=True)
            start += piece.num_rows
        return len(parts) == len(batch.pieces)

    def _is_good(self, piece: Piece, alone: bool) -> bool:
        """Whether a piece may be computed with others; one that may not has been answered."""
        job = _job_of(piece.ticket)
        rows = job.rows
        if rows is None:
            return False
        if time.monotonic() >= piece.ticket.expires_s:
            self._fail(job, DeadlineExceeded("the request waited in the queue beyond its deadline"))
            return False
        if alone or not isinstance(rows, torch.Tensor) or piece.ticket.call.arithmetic is Arithmetic.RING:
            return True
        if all_finite(rows[piece.first_row : piece.first_row + piece.num_rows]):
            return True
        self._fail(job, InvalidTensor("a row holds NaN or infinity"))
        return False

    def _compute_piece(self, piece: Piece, rows: Rows) -> bool:
        try:
            reply = self._product(piece.ticket.call, rows)
        except VeilbaseError as exc:
            self._fail(_job_of(piece.ticket), exc)
            return False
        self._deliver(piece, reply, is_shared=False)
        return True

    def _deliver(self, piece: Piece, part: torch.Tensor, is_shared: bool) -> None:
        """Puts a piece's part of a product in its place; answers a request that is complete."""
        job, num_rows = _job_of(piece.ticket), piece.ticket.num_rows
        rows, reply = job.rows, job.reply
        if rows is None:
            return  # cancelled in the meantime
        if piece.num_rows == num_rows:
            reply = part.clone() if is_shared else part
        else:
            if reply is None:
                reply = job.reply = torch.empty(num_rows, part.shape[1], dtype=part.dtype)
            reply[piece.first_row : piece.first_row + piece.num_rows] = part
        if piece.is_last:
            self._finish(job, rows, reply)

    def _finish(self, job: Job, rows: Rows, reply: torch.Tensor) -> None:
        job.drop()
        if self._completed is not None:
            self._completed(job.ticket.tenant, job.ticket.call, rows, reply)
        job.done(reply)

    def _fail_all(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            try:
                self._fail(_job_of(ticket), RemoteFault("the provider failed while computing"))
            except Exception as exc:  # noqa: BLE001 - the others are to be told as well
                _LOGGER.error("a request could not be told that it failed: %s", type(exc).__name__)

    def _fail(self, job: Job, error: VeilbaseError) -> None:
        """Answers with an error a job that was neither answered nor cancelled."""
        is_open = job.rows is not None
        self.cancel(job)
        if is_open:
            job.done(error)


def _job_of(ticket: Ticket) -> Job:
    job = ticket.job
    if not isinstance(job, Job):
        raise TypeError("a ticket of another executor")
    return job


def _rows_of(piece: Piece) -> Rows | None:
    """The piece's rows; None where the request was cancelled."""
    rows = _job_of(piece.ticket).rows
    if isinstance(rows, SeededRows):
        return SeededRows(rows.seed, rows.first_row + piece.first_row, piece.num_rows)
    return None if rows is None else rows[piece.first_row : piece.first_row + piece.num_rows]
