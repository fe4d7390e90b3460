"""The threads that make products: take batches from the scheduler, gather rows, and give each request its reply.

Guarantees: a request ends by exactly one call of `done`, or by none once it is cancelled; a fault of one request is
that request's alone, whoever shared its product; a reply owns its memory, so that a tenant who does not read holds
nobody else's. In ring arithmetic a reply does not depend on what shared its batch; in float it does within rounding,
since a matrix product of another height may add in another order. What a lost replica had begun, another makes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from provider.executor import all_finite
from provider.job import Completed, Job, Outcome, job_of, rows_of
from provider.operations.meter import Meter
from provider.replica import Replica, ReplicaLost
from provider.schedule.scheduler import Scheduler
from provider.schedule.ticket import Batch, Piece, Ticket
from provider.threads import use_one_core
from wire.errors import DeadlineExceeded, InvalidTensor, RemoteFault, Unavailable, VeilbaseError
from wire.expand import Rows
from wire.frame import DTYPES, Arithmetic, Call

_LOGGER = logging.getLogger(__name__)
_CLOSE_S = 15.0
RETRY_S = 1.0
"""When to come again while a lost shard is being brought back."""
_JOIN_S = 60.0
"""How long requests are told to come again where another host may join."""
_MAX_LOSSES = 2
"""Replicas that one batch may take with it: it may be what ends them."""


class _Lane:
    """One replica and its thread; used under the executor's lock."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.is_busy = self.is_lost = False  # busy: with one product, in whichever thread
        self.thread: threading.Thread | None = None


class Executor:
    """One thread a replica; requests small enough may be computed by who brings them, while nothing waits."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        scheduler: Scheduler,
        completed: Completed | None = None,
        meter: Meter | None = None,
        charge: Callable[[str, float], None] = lambda tenant, seconds: None,
    ) -> None:
        """Args.

        replicas: all of the same weights; each takes the next batch when it is done with one. None: others will join.
        scheduler: says which; used under this object's lock alone.
        completed: told of every request, when it is answered with a tensor, or fails or is cancelled.
        meter: told of every product.
        charge: told a tenant's share of every product's seconds.
        """
        self._scheduler, self._completed = scheduler, completed
        self._meter, self._charge = meter or Meter(), charge
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._lanes: list[_Lane] = []
        self._is_beside, self._num_beside = False, 0
        """Whether a small product is made beside another one, which the lane does not show; how many have begun."""
        self._num_expected, self._turn = max(1, len(replicas)), 0
        self._is_joined, self._empty_since_s = not replicas, time.monotonic()
        self._orphans: deque[tuple[Batch, int]] = deque()
        """Batches of replicas that are gone, and how many each has outlived."""
        for replica in replicas:
            self.add(replica)

    def add(self, replica: Replica) -> None:
        """One more replica, from now on."""
        lane = _Lane(replica)
        lane.thread = threading.Thread(target=self._run, args=(lane,), name="veilbase-compute", daemon=True)
        with self._changed:
            self._lanes.append(lane)
        lane.thread.start()

    def join(self, replica: Replica) -> None:
        """`add`, of one that may leave and come back: requests that find nobody are told to come again, for a while."""
        self._is_joined = True
        self.add(replica)

    def note_lost(self, replica: Replica) -> None:
        """Somebody else saw that a replica is gone, before a product did."""
        with self._changed:
            for lane in self._lanes:
                if lane.replica is replica:
                    lane.is_lost = True  # its thread sees to it
            self._changed.notify_all()

    def look(self) -> None:
        """Notices replicas that went away while they had nothing to do."""
        with self._changed:
            gone = [one for one in self._lanes if not (one.is_busy or one.is_lost or one.replica.is_alive)]
            for lane in gone:
                lane.is_lost = True
            if gone:
                self._changed.notify_all()

    @property
    def num_replicas(self) -> tuple[int, int]:
        """Replicas that can make products, and all that there should be."""
        with self._changed:
            return sum(not lane.is_lost for lane in self._lanes), max(self._num_expected, len(self._lanes))

    # ---- in -------------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queues a job; answers it at once where no replica is left."""
        if job.ticket.num_rows == 0:
            self._answer_empty(job)
            return
        with self._changed:
            error = self._none_left()
            if error is None:
                self._scheduler.add(job.ticket, time.monotonic())
                self._changed.notify_all()  # who is woken may be a lane whose replica is busy
        if error is not None:
            self._fail(job, error)

    def _answer_empty(self, job: Job) -> None:
        """No row needs no replica."""
        rows = job.rows  # once: whoever cancels the job takes them
        if rows is not None:
            self._finish(job, rows, torch.empty(0, job.reply_cols, dtype=DTYPES[job.ticket.call.arithmetic]))

    def compute_here(self, tenant: str, call: Call, rows: Rows) -> Outcome | None:
        """The reply to a small request, made in the calling thread on one core; None where it should be queued instead.

        No job is made for it: a decode step is a hundred such calls, and each pays for every object. Under a latency
        target one such request at a time need not wait for the end of a large product, where the replica can make it
        beside: the operating system gives each its part of the core.
        """
        if not self._idle() and not self._beside():
            return None  # looked at without the lock first: what is chosen wrongly is queued, and answered all the same
        with self._changed:
            if not self._scheduler.would_take_decode:
                return None
            idle = self._idle()
            lane = idle or self._beside()
            if lane is None:
                return None
            if idle:
                lane.is_busy = True
            else:
                self._is_beside = True
                self._num_beside += 1
            self._turn += 1
        began_s = time.monotonic()
        is_lost = False
        try:
            use_one_core()
            reply = lane.replica.product(call, rows)
        except VeilbaseError as exc:
            self._tell(tenant, call, rows, None)
            return exc
        except ReplicaLost:
            is_lost = True
            return None
        except Exception as exc:  # noqa: BLE001 - the caller is a stream's reader, and goes on
            _LOGGER.error("a product failed: %s", type(exc).__name__)
            self._tell(tenant, call, rows, None)
            return _FAILED
        finally:
            self._done_here(lane, idle is None, tenant, call, began_s, is_lost)
        self._tell(tenant, call, rows, reply)
        return reply

    def _idle(self) -> _Lane | None:
        lanes = self._lanes
        for index in range(len(lanes)):
            lane = lanes[(self._turn + index) % len(lanes)]
            if not lane.is_busy and not lane.is_lost:
                return lane
        return None

    def _beside(self) -> _Lane | None:
        if self._is_beside or not self._scheduler.has_target:
            return None
        return next((lane for lane in self._lanes if lane.replica.can_share and not lane.is_lost), None)

    def _done_here(self, lane: _Lane, is_beside: bool, tenant: str, call: Call, began_s: float, is_lost: bool) -> None:
        now_s = time.monotonic()
        with self._changed:
            if is_beside:
                self._is_beside = False
            else:
                lane.is_busy = False
            if is_lost:
                lane.is_lost = True  # its thread sees to it
                self._changed.notify_all()
                return
            self._scheduler.computed_elsewhere(tenant, call, began_s, now_s)
            if self._scheduler or self._orphans or lane.is_lost:
                self._changed.notify_all()
        self._meter.inline(call.group, now_s - began_s)
        self._charge(tenant, now_s - began_s)

    def cancel(self, job: Job) -> None:
        """Takes a job out of the queue, and drops its rows."""
        with self._changed:
            self._scheduler.cancel(job.ticket)
        rows = job.rows
        job.drop()
        if rows is not None:
            self._tell(job.ticket.tenant, job.ticket.call, rows, None)

    def _tell(self, tenant: str, call: Call, rows: Rows, reply: torch.Tensor | None) -> None:
        if self._completed is not None:
            self._completed(tenant, call, rows, reply)

    def __len__(self) -> int:
        """Requests that wait."""
        with self._changed:
            return len(self._scheduler)

    def close(self) -> None:
        """Ends each thread after the batch that it is on, and lets the replicas go."""
        self.begin_close()
        with self._changed:
            lanes = list(self._lanes)
        for lane in lanes:
            if lane.thread is not None:
                lane.thread.join(timeout=_CLOSE_S)
            lane.replica.close()  # which frees a thread that waits for one that hangs
            if lane.thread is not None:
                lane.thread.join(timeout=_CLOSE_S)

    def begin_close(self) -> None:
        """Tells the threads, without waiting for them."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()

    # ---- the threads ----------------------------------------------------------------------------------------------

    def _run(self, lane: _Lane) -> None:
        while not self._closing.is_set():
            try:
                work = self._next_batch(lane)
                if work is not None:
                    self._run_batch(lane, *work)
                elif lane.is_lost and not self._is_back(lane):
                    return
            except Exception as exc:  # noqa: BLE001 - the thread serves every tenant and must go on
                _LOGGER.error("the scheduler failed, and its queue is answered with errors: %s", type(exc).__name__)
                with self._changed:
                    left = self._scheduler.abandon()
                self._fail_all(left, _FAILED)
            work = None  # or the last reply's memory would be held until the next request

    def _run_batch(self, lane: _Lane, batch: Batch, num_losses: int) -> None:
        """Makes a batch's products, lets the replica go, and only then sees to the replies.

        Whoever is woken by a reply may take this core, and nobody should find the replica busy for as long.
        """
        began_s = time.monotonic()
        made: list[tuple[Piece, Outcome]] = []
        is_whole = has_failed = False
        num_beside = self._num_beside + self._is_beside  # a product that shared its core says nothing about its time
        try:
            made, is_whole = self._products(lane.replica, batch)
        except ReplicaLost as exc:
            self._lose(lane, batch, num_losses + exc.began)
            return
        except Exception as exc:  # noqa: BLE001 - as above
            _LOGGER.error("a batch failed: %s", type(exc).__name__)
            has_failed = True
        seconds = time.monotonic() - began_s
        with self._changed:
            lane.is_busy = False
            if is_whole and num_beside == self._num_beside:
                self._scheduler.computed(batch, seconds)
            self._scheduler.finished(batch, began_s + seconds)
        if has_failed:
            self._fail_all([piece.ticket for piece in batch.pieces], _FAILED)
        while made:  # a reply is held by nobody else once it is answered
            piece, outcome = made.pop(0)
            try:
                self._deliver(piece, outcome)
            except Exception as exc:  # noqa: BLE001 - as above
                _LOGGER.error("a reply could not be given: %s", type(exc).__name__)
                self._fail_all([piece.ticket], _FAILED)

    def _next_batch(self, lane: _Lane) -> tuple[Batch, int] | None:
        """What this lane is to compute, and how many replicas that has outlived; None at the end, or lost."""
        with self._changed:
            while not self._closing.is_set() and not lane.is_lost:
                now, due = time.monotonic(), None
                if not lane.is_busy:
                    work = self._orphans.popleft() if self._orphans else None
                    batch = None if work else self._scheduler.next_batch(now)
                    if work or batch:
                        lane.is_busy = True
                        return work or (batch, 0)  # type: ignore[return-value]
                    due = self._scheduler.next_due_s()
                self._changed.wait(None if due is None else max(0.0, due - now))
        return None

    # ---- loss -----------------------------------------------------------------------------------------------------

    def _lose(self, lane: _Lane, batch: Batch, num_losses: int) -> None:
        """Leaves a batch to another replica, unless it seems to be what ends them."""
        with self._changed:
            lane.is_busy, lane.is_lost = False, True
            is_tried_again = num_losses < _MAX_LOSSES
            if is_tried_again:
                self._orphans.append((batch, num_losses))
            self._changed.notify_all()
        if not is_tried_again:
            _LOGGER.error("a batch of group %d outlived %d replicas, and is given up", batch.call.group, num_losses)
            self._fail_all([piece.ticket for piece in batch.pieces], _FAILED)

    def _none_left(self) -> Unavailable | None:
        """Why nothing can be computed, if so; under the lock."""
        if any(not lane.is_lost for lane in self._lanes):
            return None
        is_waited_for = self._is_joined and time.monotonic() - self._empty_since_s < _JOIN_S
        can_return = is_waited_for or any(lane.replica.can_return for lane in self._lanes)
        return _unavailable(RETRY_S if can_return else 0.0)

    def _is_back(self, lane: _Lane) -> bool:
        """Waits for a lost replica; meanwhile, and where it does not return, what nobody else can do is refused."""
        self._refuse_all()
        try:
            is_back = lane.replica.revive(self._closing)
        except Exception as exc:  # noqa: BLE001 - the others go on
            _LOGGER.error("a replica could not be brought back: %s", type(exc).__name__)
            is_back = False
        with self._changed:
            lane.is_lost = not is_back
            if not is_back:
                self._lanes.remove(lane)
                self._empty_since_s = time.monotonic()
        if not is_back:
            lane.replica.close()
            self._refuse_all()
        return is_back

    def _refuse_all(self) -> None:
        """Answers all that waits, where no replica is left."""
        with self._changed:
            error = self._none_left()
            if error is None:
                return
            left = [piece.ticket for batch, _ in self._orphans for piece in batch.pieces] + self._scheduler.abandon()
            self._orphans.clear()
        self._fail_all(left, error)

    # ---- one batch ------------------------------------------------------------------------------------------------

    def _products(self, replica: Replica, batch: Batch) -> tuple[list[tuple[Piece, Outcome]], bool]:
        """What came of each piece that is still wanted, and whether every row was multiplied, once.

        Only then is the time taken for a measurement of how long so many rows take.
        """
        pieces = [piece for piece in batch.pieces if self._is_good(piece, alone=len(batch.pieces) == 1)]
        parts = [(piece, rows) for piece in pieces if (rows := rows_of(piece)) is not None]
        if not parts:
            return [], False
        began_s = time.monotonic()
        made = self._together(replica, batch.call, parts) if len(parts) > 1 else []
        is_one = bool(made) or len(parts) == 1
        if is_one and not made:
            made = [(piece, _alone(replica, batch.call, rows)) for piece, rows in parts]
        elif not made:  # whose fault it was shows when each runs alone; whoever ends the replica spoils no other's
            for piece, rows in parts:
                self._deliver(piece, _alone(replica, batch.call, rows))
        seconds = time.monotonic() - began_s
        computed = [piece for piece, _ in parts]
        self._meter.batch(computed, began_s, seconds)
        num_rows = sum(piece.num_rows for piece in computed)
        for piece in computed:
            self._charge(piece.ticket.tenant, seconds * piece.num_rows / num_rows)
        is_good = bool(made) and all(isinstance(outcome, torch.Tensor) for _, outcome in made)
        return made, is_one and is_good and len(parts) == len(batch.pieces)

    def _together(
        self, replica: Replica, call: Call, parts: Sequence[tuple[Piece, Rows]]
    ) -> list[tuple[Piece, Outcome]]:
        """One product of all rows; nothing where it was refused."""
        try:
            replies = replica.products(call, [rows for _, rows in parts if isinstance(rows, torch.Tensor)])
        except VeilbaseError:
            return []
        return [(piece, reply) for (piece, _), reply in zip(parts, replies, strict=True)]

    def _is_good(self, piece: Piece, alone: bool) -> bool:
        """Whether a piece may be computed with others; one that may not has been answered."""
        job = job_of(piece.ticket)
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

    def _deliver(self, piece: Piece, outcome: Outcome) -> None:
        """Puts a piece's part of a product in its place; answers a request that is complete."""
        job, num_rows = job_of(piece.ticket), piece.ticket.num_rows
        rows = job.rows
        if rows is None:
            return  # cancelled in the meantime
        if not isinstance(outcome, torch.Tensor):
            self._fail(job, outcome)
            return
        if piece.num_rows == num_rows:
            self._finish(job, rows, outcome)
            return
        with self._changed:  # two replicas may have two pieces of it at a time
            reply = job.reply_of(outcome)
        reply[piece.first_row : piece.first_row + piece.num_rows] = outcome
        with self._changed:
            if piece.first_row in job.placed:  # made again after a loss
                return
            job.placed[piece.first_row] = piece.num_rows
            is_whole = sum(job.placed.values()) == num_rows
        if is_whole:
            self._finish(job, rows, reply)

    def _finish(self, job: Job, rows: Rows, reply: torch.Tensor) -> None:
        job.drop()
        try:
            self._tell(job.ticket.tenant, job.ticket.call, rows, reply)
        finally:
            job.done(reply)

    def _fail_all(self, tickets: Sequence[Ticket], error: VeilbaseError) -> None:
        for ticket in tickets:
            try:
                self._fail(job_of(ticket), error)
            except Exception as exc:  # noqa: BLE001 - the others are to be told as well
                _LOGGER.error("a request could not be told that it failed: %s", type(exc).__name__)

    def _fail(self, job: Job, error: VeilbaseError) -> None:
        """Answers with an error a job that was neither answered nor cancelled."""
        is_open = job.rows is not None
        self.cancel(job)
        if is_open:
            job.done(error)


def _alone(replica: Replica, call: Call, rows: Rows) -> Outcome:
    try:
        return replica.product(call, rows)
    except VeilbaseError as exc:
        return exc


_FAILED = RemoteFault("the provider failed while computing")


def _unavailable(retry_s: float) -> Unavailable:
    return Unavailable("the shard that holds this layer is lost", retry_s)
