"""Computes the tenants' requests: worker threads, one for each replica, take batches from the scheduler, compute their
products and deliver the replies.

`Computes` lists what the streams of tenants need from whatever computes their requests. `Replies` puts together the
reply to each request (provider/engine/request.py) from its products, and calls the request's `done`.

Guarantees: `done` is called exactly once for each request, or not at all if the request is cancelled. If a request is
invalid, only that request fails; the other requests in its batch succeed. If one callback raises an error, the other
callbacks are still called. Every reply owns its memory, so a tenant that does not read its reply keeps no other
tenant's reply in memory. In ring arithmetic a reply does not depend on the other requests in its batch. In float it may
differ by rounding, since a matrix product with another number of rows may add its terms in another order. If a replica
is lost, another replica computes its unfinished batches. A batch fails if `_MAX_LOSSES` replicas were lost while
computing it, or if no replica is left.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from provider.engine.products import all_finite
from provider.engine.replica import RETRY_S, Replica, ReplicaLost
from provider.engine.request import Outcome, Request, request_of
from provider.operations.metrics import Meter
from provider.schedule.scheduler import Scheduler
from provider.schedule.ticket import Batch, Piece, Ticket
from runtime.threads import use_one_core
from wire.errors import DeadlineExceeded, InvalidTensor, RemoteFault, Unavailable, VeilbaseError
from wire.frame import DTYPES, Arithmetic, Call
from wire.ring.seeded_rows import Rows


class Computes(Protocol):
    """Lists the methods that a session calls to have requests computed, by one executor or by several."""

    def submit(self, request: Request) -> None:
        """Queues a request; `provider.engine.executor.Executor` describes this method and the methods below."""
        ...

    def compute_here(self, tenant: str, call: Call, rows: Rows) -> Outcome | None: ...

    def compute_row(self, tenant: str, call: Call, row: memoryview, reply: memoryview) -> VeilbaseError | bool: ...

    def cancel(self, request: Request) -> None: ...


Completed = Callable[[str, Call, Rows, torch.Tensor | None], None]
"""A callback that is called before a reply is sent, with the tenant's name, the call, all rows of the request, and the
reply, which is None if the request failed or was cancelled."""


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

    def cancel(self, request: Request) -> bool:
        """Takes a request out of the queue and drops its rows; returns False if the request had already ended."""
        self._unqueue(request.ticket)
        rows = request.end()
        if rows is not None:
            self.tell(request.tenant, request.header.call, rows, None)
        return rows is not None

    def is_good(self, piece: Piece, alone: bool) -> bool:
        """Returns whether a piece may be computed in its batch. If not, the request has already ended, or this call
        fails it, because its deadline has passed or because the piece holds a value that is not finite.

        If the piece is `alone` in its batch, its values are not checked here, since they can harm no other request.
        """
        request = request_of(piece.ticket)
        rows = request.rows
        if rows is None:
            return False
        if time.monotonic() >= piece.ticket.expires_s:
            self.fail(request, DeadlineExceeded("the request waited in the queue beyond its deadline"))
            return False
        if alone or not isinstance(rows, torch.Tensor) or piece.ticket.call.arithmetic is Arithmetic.RING:
            return True
        if all_finite(rows[piece.first_row : piece.first_row + piece.num_rows]):
            return True
        self.fail(request, InvalidTensor("a row holds NaN or infinity"))
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
        request = request_of(piece.ticket)
        if request.rows is None:
            return  # The request has been cancelled meanwhile.
        if not isinstance(outcome, torch.Tensor):
            self.fail(request, outcome)
            return
        reply = outcome if piece.num_rows == piece.ticket.num_rows else request.place(piece, outcome)
        if reply is not None:
            self.finish(request, reply)

    def finish(self, request: Request, reply: torch.Tensor) -> None:
        """Ends a request and calls its `done` with the complete reply; does nothing if it has already ended."""
        rows = request.end()
        if rows is None:
            return
        try:
            self.tell(request.tenant, request.header.call, rows, reply)
        finally:
            request.done(reply)

    def fail_all(self, tickets: Sequence[Ticket], error: VeilbaseError) -> None:
        for ticket in tickets:
            try:
                self.fail(request_of(ticket), error)
            except Exception as exc:  # noqa: BLE001 - the others must be told as well
                _LOGGER.error("a request could not be told that it failed: %s", type(exc).__name__)

    def fail(self, request: Request, error: VeilbaseError) -> None:
        """Ends a request and calls its `done` with an error, unless it has already ended."""
        if self.cancel(request):
            request.done(error)


_Made = TypeVar("_Made")
_CLOSE_S = 15.0
_MAX_LOSSES = 2
"""A batch fails once this number of replicas were lost while computing it, since the batch may make them crash."""


class _Runner:
    """Holds one replica, its worker thread and its state; the state is changed only under the executor's lock."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.is_busy = self.is_lost = False  # A busy runner computes a product, in any thread.
        self.thread: threading.Thread | None = None


class Executor:
    """Runs one worker thread for each replica. A thread that receives a small request may compute the request itself,
    as long as no other request waits."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        scheduler: Scheduler,
        completed: Completed | None = None,
        meter: Meter | None = None,
        charge: Callable[[str, float], None] = lambda tenant, seconds: None,
    ) -> None:
        """Starts the worker threads, which compute the scheduler's batches.

        Args:
            replicas: replicas with the same weights; each takes a new batch when its last batch is done.
            scheduler: chooses the batches; it is used under this object's lock only.
            completed: called for every request that gets a reply, fails or is cancelled.
            meter: counts every product.
            charge: called with a tenant's name and its share of a product's seconds.
        """
        self._scheduler, self._replies = scheduler, Replies(completed, self._unqueue)
        self._meter, self._charge = meter or Meter(), charge
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._runners: list[_Runner] = []
        self._is_beside, self._beside_s = False, 0.0
        """The first says whether a small product runs at the same time as a larger one on one replica, which `is_busy`
        of the runner does not show. The second is the processor time of all such small products, in seconds."""
        self._num_expected, self._turn = len(replicas), 0
        self._orphans: deque[tuple[Batch, int]] = deque()
        """Unfinished batches of lost replicas, each with the number of replicas that were lost while computing it."""
        for replica in replicas:
            self.add(replica)

    def add(self, replica: Replica) -> None:
        """Adds a replica and starts its worker thread."""
        runner = _Runner(replica)
        runner.thread = threading.Thread(target=self._run, args=(runner,), name="veilbase-compute", daemon=True)
        with self._changed:
            self._runners.append(runner)
        runner.thread.start()

    def look(self) -> None:
        """Checks all idle replicas, and marks each replica that is no longer alive as lost."""
        with self._changed:
            gone = [one for one in self._runners if not (one.is_busy or one.is_lost or one.replica.is_alive)]
            for runner in gone:
                runner.is_lost = True
            if gone:
                self._changed.notify_all()

    @property
    def is_busy(self) -> bool:
        """Returns whether a product is being computed or is queued. The result may be out of date: no lock is taken."""
        return bool(self._scheduler) or any(runner.is_busy for runner in self._runners)

    @property
    def num_replicas(self) -> tuple[int, int]:
        """Returns two counts: the replicas that can compute products now, and the replicas that are expected."""
        with self._changed:
            return sum(not runner.is_lost for runner in self._runners), max(self._num_expected, len(self._runners))

    @property
    def is_given_up(self) -> bool:
        """Returns whether all replicas are gone for good, so that only a restart of the provider can help."""
        with self._changed:
            return not self._runners

    # ---- taking requests ------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queues a complete request. One without rows gets an empty reply at once, for which no replica is needed; any
        other fails at once if all replicas are lost."""
        if request.header.rows == 0:
            dtype = DTYPES[request.header.call.arithmetic]
            self._replies.finish(request, torch.empty(0, request.reply_cols, dtype=dtype, device="cpu"))
            return
        with self._changed:
            error = self._none_left()
            if error is None:
                self._scheduler.add(request.ticket, time.monotonic())
                self._changed.notify_all()  # All runners are woken, since a single woken runner might be a busy one.
        if error is not None:
            self._replies.fail(request, error)

    def compute_here(self, tenant: str, call: Call, rows: Rows) -> Outcome | None:
        """Computes a small request in the calling thread on one core; returns None if it should be queued instead.

        It makes no ticket, which saves time, since a decode step has about a hundred such requests. With a latency
        target, one such request may run while a replica whose `can_share` is true computes a large product.
        """
        product = call.product
        outcome = self._make_here(tenant, product, lambda replica: replica.product(product, rows))
        if outcome is not None:
            self._replies.tell(tenant, call, rows, outcome if isinstance(outcome, torch.Tensor) else None)
        return outcome

    def compute_row(self, tenant: str, call: Call, row: memoryview, reply: memoryview) -> VeilbaseError | bool:
        """Computes a request of one row in the calling thread, from the request's bytes to the reply's, with numbers of
        the call's widths. `check_call` must have passed.

        Returns:
            The error if the request failed; True if `reply` is written; False if the request should be queued.
        """
        runner = self._idle() or self._beside()
        multiply = None if runner is None or self._replies.are_told else runner.replica.row_product(call)
        if multiply is None:
            return False

        # `_make_here` may choose another replica; all replicas have the same weights.
        def make(_replica: Replica) -> bool:
            multiply(row, reply)
            return True

        return self._make_here(tenant, call.product, make) or False

    def _make_here(self, tenant: str, call: Call, make: Callable[[Replica], _Made]) -> _Made | VeilbaseError | None:
        """Calls `make` with a free replica in this thread, and returns the result of `make` or the error. Returns None
        if a queued request must go first, if every replica is busy or lost, or if the replica is lost meanwhile."""
        if not self._idle() and not self._beside():
            # This check takes no lock. If it is out of date, the request is merely queued.
            return None
        with self._changed:
            idle = self._idle()
            if not self._scheduler.takes_decode(tenant, time.monotonic(), idle is not None):
                return None
            runner = idle or self._beside()
            if runner is None:
                return None
            if idle:
                runner.is_busy = True
            else:
                self._is_beside = True
            self._turn += 1
        began_s, began_cpu_s = time.monotonic(), 0.0 if idle else time.thread_time()
        is_lost = False
        try:
            use_one_core()
            return make(runner.replica)
        except VeilbaseError as exc:
            return exc
        except ReplicaLost:
            is_lost = True
            return None
        except Exception as exc:  # noqa: BLE001 - the caller is a stream's reader, and goes on
            _LOGGER.error("a product failed: %s", type(exc).__name__)
            return FAILED
        finally:
            beside_s = None if idle else time.thread_time() - began_cpu_s
            self._done_here(runner, beside_s, tenant, call, began_s, is_lost)

    def _idle(self) -> _Runner | None:
        runners = self._runners
        for index in range(len(runners)):
            runner = runners[(self._turn + index) % len(runners)]
            if not runner.is_busy and not runner.is_lost:
                return runner
        return None

    def _beside(self) -> _Runner | None:
        if self._is_beside or not self._scheduler.has_target:
            return None
        return next((runner for runner in self._runners if runner.replica.can_share and not runner.is_lost), None)

    def _done_here(
        self, runner: _Runner, beside_s: float | None, tenant: str, call: Call, began_s: float, is_lost: bool
    ) -> None:
        """Frees the runner after a small product, and charges the tenant. The charge is
        `beside_s`, the processor time, if another product ran at the same time; else (None) the elapsed time."""
        now_s = time.monotonic()
        with self._changed:
            if beside_s is None:
                runner.is_busy = False
            else:
                self._is_beside = False
                self._beside_s += beside_s
            if is_lost:
                runner.is_lost = True  # The runner's thread revives or removes the replica.
                self._changed.notify_all()
                return
            self._scheduler.computed_elsewhere(tenant, call, began_s, now_s)
            if self._scheduler or self._orphans or runner.is_lost:
                self._changed.notify_all()
        self._meter.inline(call.group, now_s - began_s)
        self._charge(tenant, now_s - began_s if beside_s is None else beside_s)

    def cancel(self, request: Request) -> None:
        """Takes a request out of the queue and drops its rows."""
        self._replies.cancel(request)

    def _unqueue(self, ticket: Ticket) -> None:
        with self._changed:
            self._scheduler.cancel(ticket)

    def __len__(self) -> int:
        with self._changed:
            return len(self._scheduler)

    def close(self) -> None:
        """Ends each worker thread once its current batch is computed, and closes the replicas."""
        self.begin_close()
        with self._changed:
            runners = list(self._runners)
        for runner in runners:
            if runner.thread is not None:
                runner.thread.join(timeout=_CLOSE_S)
            runner.replica.close()  # This ends the wait of a thread whose replica hangs.
            if runner.thread is not None:
                runner.thread.join(timeout=_CLOSE_S)

    def begin_close(self) -> None:
        """Asks the worker threads to end, without waiting for them."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()

    # ---- the threads ----------------------------------------------------------------------------------------------

    def _run(self, runner: _Runner) -> None:
        while not self._closing.is_set():
            try:
                work = self._next_batch(runner)
                if work is not None:
                    self._run_batch(runner, *work)
                elif runner.is_lost and not self._is_back(runner):
                    return
            except Exception as exc:  # noqa: BLE001 - the thread serves every tenant and must go on
                _LOGGER.error("the scheduler failed, and its queue is answered with errors: %s", type(exc).__name__)
                with self._changed:
                    left = self._scheduler.abandon()
                self._replies.fail_all(left, FAILED)
            work = None  # Otherwise the last batch's memory would be kept until the next request.

    def _run_batch(self, runner: _Runner, batch: Batch, num_losses: int) -> None:
        """Computes a batch's products, marks the replica as free, and only then delivers the replies.

        The delivery wakes other threads, which may use this core for a while. The replica should be free by then.
        """
        made: list[tuple[Piece, Outcome]] = []
        measured_s, has_failed = None, False
        try:
            made, measured_s = self._products(runner.replica, batch)
        except ReplicaLost as exc:
            self._lose(runner, batch, num_losses + exc.began)
            return
        except Exception as exc:  # noqa: BLE001 - the thread serves every tenant and must go on
            _LOGGER.error("a batch failed: %s", type(exc).__name__)
            has_failed = True
        try:
            with self._changed:
                runner.is_busy = False
                if measured_s is not None:
                    self._scheduler.computed(batch, measured_s)
                self._scheduler.finished(batch, time.monotonic())
        finally:
            if has_failed:
                self._replies.fail_all([piece.ticket for piece in batch.pieces], FAILED)
            while made:  # Each reply leaves the list before it is delivered, so that its memory can be freed early.
                self._replies.deliver(*made.pop(0))

    def _next_batch(self, runner: _Runner) -> tuple[Batch, int] | None:
        """Waits for a replica's next batch. Returns the batch and the number of replicas that were lost while computing
        it, or None if the executor closes or the replica is lost."""
        with self._changed:
            while not self._closing.is_set() and not runner.is_lost:
                now, due = time.monotonic(), None
                if not runner.is_busy:
                    work = self._orphans.popleft() if self._orphans else None
                    batch = None if work else self._scheduler.next_batch(now)
                    if work or batch:
                        runner.is_busy = True
                        return work or (batch, 0)  # type: ignore[return-value]
                    due = self._scheduler.next_due_s()
                self._changed.wait(None if due is None else max(0.0, due - now))
        return None

    # ---- loss -----------------------------------------------------------------------------------------------------

    def _lose(self, runner: _Runner, batch: Batch, num_losses: int) -> None:
        """Marks a runner's replica as lost. Its batch goes to another replica, or fails after `_MAX_LOSSES` losses."""
        with self._changed:
            runner.is_busy, runner.is_lost = False, True
            is_tried_again = num_losses < _MAX_LOSSES
            if is_tried_again:
                self._orphans.append((batch, num_losses))
            self._changed.notify_all()
        if not is_tried_again:
            _LOGGER.error("a batch of group %d outlived %d replicas, and is given up", batch.call.group, num_losses)
            self._replies.fail_all([piece.ticket for piece in batch.pieces], FAILED)

    def _none_left(self) -> Unavailable | None:
        """Returns the error for new requests if every replica is lost, else None. Callers must hold the lock."""
        if any(not runner.is_lost for runner in self._runners):
            return None
        can_return = any(runner.replica.can_return for runner in self._runners)
        return _unavailable(RETRY_S if can_return else 0.0)

    def _is_back(self, runner: _Runner) -> bool:
        """Tries to revive a lost replica; returns whether it can compute again. If all replicas are lost, this method
        first fails all waiting requests."""
        self._refuse_all()
        try:
            is_back = runner.replica.revive(self._closing)
        except Exception as exc:  # noqa: BLE001 - the other replicas go on
            _LOGGER.error("a replica could not be brought back: %s", type(exc).__name__)
            is_back = False
        with self._changed:
            runner.is_lost = not is_back
            if not is_back:
                self._runners.remove(runner)
        if not is_back:
            runner.replica.close()
            self._refuse_all()
        return is_back

    def _refuse_all(self) -> None:
        """Fails all waiting requests if every replica is lost."""
        with self._changed:
            error = self._none_left()
            if error is None:
                return
            left = [piece.ticket for batch, _ in self._orphans for piece in batch.pieces] + self._scheduler.abandon()
            self._orphans.clear()
        self._replies.fail_all(left, error)

    # ---- one batch ------------------------------------------------------------------------------------------------

    def _products(self, replica: Replica, batch: Batch) -> tuple[list[tuple[Piece, Outcome]], float | None]:
        """Computes a batch. Returns the outcomes to deliver, and the seconds that the batch's product took.

        If the shared product fails, each piece is computed and delivered alone, and no outcome is returned. The
        seconds are None unless one product computed all rows of the batch.
        """
        pieces = [piece for piece in batch.pieces if self._replies.is_good(piece, alone=len(batch.pieces) == 1)]
        parts = [(piece, rows) for piece in pieces if (rows := request_of(piece.ticket).rows_of(piece)) is not None]
        if not parts:
            return [], None
        began_s, beside_s = time.monotonic(), self._beside_s
        made = _at_once(replica, batch.call, parts)
        # Each piece runs alone, so only the invalid request fails. If it crashes the replica, earlier pieces are done.
        if not made:
            for piece, rows in parts:
                self._replies.deliver(piece, _alone(replica, batch.call, rows))
        seconds = time.monotonic() - began_s
        computed = [piece for piece, _ in parts]
        self._meter.batch(computed, began_s, seconds)
        # The processor time of small products beside this one is not part of its cost.
        seconds = max(0.0, seconds - (self._beside_s - beside_s))
        num_rows = sum(piece.num_rows for piece in computed)
        for piece in computed:
            self._charge(piece.ticket.tenant, seconds * piece.num_rows / num_rows)
        is_whole = bool(made) and len(parts) == len(batch.pieces)
        is_good = all(isinstance(outcome, torch.Tensor) for _, outcome in made)
        return made, seconds if is_whole and is_good else None


def _at_once(replica: Replica, call: Call, parts: Sequence[tuple[Piece, Rows]]) -> list[tuple[Piece, Outcome]]:
    """Computes all pieces of a batch by one product; returns an empty list if a product of several pieces fails."""
    if len(parts) == 1:
        return [(piece, _alone(replica, call, rows)) for piece, rows in parts]
    try:
        replies = replica.products(call, [rows for _, rows in parts if isinstance(rows, torch.Tensor)])
    except VeilbaseError:
        return []
    return [(piece, reply) for (piece, _), reply in zip(parts, replies, strict=True)]


def _alone(replica: Replica, call: Call, rows: Rows) -> Outcome:
    try:
        return replica.product(call, rows)
    except VeilbaseError as exc:
        return exc


def _unavailable(retry_s: float) -> Unavailable:
    return Unavailable("the shard that holds this layer is lost", retry_s)
