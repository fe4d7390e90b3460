"""The threads that make products: they take batches from the scheduler, gather rows, and see that all are answered.

Guarantees: a reply owns its memory, so that a tenant that does not read its reply holds no other tenant's;
`provider.engine.replies` says which requests are answered, and when. In ring arithmetic a reply does not depend on what
shared its batch; in float it does within rounding, since a matrix product of another height may add in another order.
What a lost replica had begun, another makes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from provider.engine.job import Completed, Job, Outcome, rows_of
from provider.engine.replica import Replica, ReplicaLost
from provider.engine.replies import FAILED, Replies
from provider.operations.meter import Meter
from provider.schedule.scheduler import Scheduler
from provider.schedule.ticket import Batch, Piece, Ticket
from wire.errors import Unavailable, VeilbaseError
from wire.frame import DTYPES, Call
from wire.ring.seeded_rows import Rows
from wire.ring.threads import use_one_core

_Made = TypeVar("_Made")
_LOGGER = logging.getLogger(__name__)
_CLOSE_S = 15.0
RETRY_S = 1.0
"""Seconds after which tenants may come again while a lost shard is being restored."""
REJOIN_S = 60.0
"""Seconds for which requests are told to come again where another host may join."""
_MAX_LOSSES = 2
"""Replicas that may be lost over one batch before it is given up, since the batch may be what ends them."""


class _Lane:
    """One replica and its thread. It is used under the executor's lock."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.is_busy = self.is_lost = False  # A busy lane makes one product, in whichever thread.
        self.thread: threading.Thread | None = None


class Executor:
    """Runs one thread for each replica. The thread that brings a small request may compute it itself, while nothing
    waits."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        scheduler: Scheduler,
        completed: Completed | None = None,
        meter: Meter | None = None,
        charge: Callable[[str, float], None] = lambda tenant, seconds: None,
    ) -> None:
        """Starts the threads.

        Args:
            replicas: all have the same weights; each takes the next batch when it is done with one. If there are none,
                others will join.
            scheduler: chooses batches; used under this object's lock alone.
            completed: called for every request when it is answered with a tensor, or fails or is cancelled.
            meter: counts every product.
            charge: called with a tenant and its share of a product's seconds.
        """
        self._scheduler, self._replies = scheduler, Replies(completed, self._unqueue)
        self._meter, self._charge = meter or Meter(), charge
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._lanes: list[_Lane] = []
        self._is_beside, self._beside_s = False, 0.0
        """Whether a small product is being made beside another one, which the lane does not show; and the processor
        seconds that all such products took."""
        self._num_expected, self._turn = max(1, len(replicas)), 0
        self._is_joined = not replicas
        self._empty_since_s = float("inf")  # A replica that never came is waited for, however long that takes.
        self._orphans: deque[tuple[Batch, int]] = deque()
        """Batches of replicas that are gone, and how many replicas each has outlived."""
        for replica in replicas:
            self.add(replica)

    def add(self, replica: Replica) -> None:
        """Adds one more replica."""
        lane = _Lane(replica)
        lane.thread = threading.Thread(target=self._run, args=(lane,), name="veilbase-compute", daemon=True)
        with self._changed:
            self._lanes.append(lane)
        lane.thread.start()

    def join(self, replica: Replica) -> None:
        """Adds a replica that may leave and come back: requests that find none are told to come again, for a while."""
        self._is_joined = True
        self.add(replica)

    def note_lost(self, replica: Replica) -> None:
        """Notes that a replica is gone, for a caller that saw it before a product did."""
        with self._changed:
            for lane in self._lanes:
                if lane.replica is replica:
                    lane.is_lost = True  # The lane's thread does the rest.
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
    def is_busy(self) -> bool:
        """Tells whether a product is being made, or waits to be; without a lock, so the answer may be late."""
        return bool(self._scheduler) or any(lane.is_busy for lane in self._lanes)

    @property
    def num_replicas(self) -> tuple[int, int]:
        """Returns how many replicas can make products, and how many there should be."""
        with self._changed:
            return sum(not lane.is_lost for lane in self._lanes), max(self._num_expected, len(self._lanes))

    @property
    def is_given_up(self) -> bool:
        """Tells whether no replica will make products any more, unless the provider is started again."""
        with self._changed:
            return not self._lanes and not self._is_joined

    # ---- taking requests ------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queues a job; answers it at once where no replica is left."""
        if job.ticket.num_rows == 0:
            self._answer_empty(job)
            return
        with self._changed:
            error = self._none_left()
            if error is None:
                self._scheduler.add(job.ticket, time.monotonic())
                self._changed.notify_all()  # All are woken, since one alone might be a lane whose replica is busy.
        if error is not None:
            self._replies.fail(job, error)

    def _answer_empty(self, job: Job) -> None:
        """Answers a request without rows, which needs no replica."""
        dtype = DTYPES[job.ticket.call.arithmetic]
        self._replies.finish(job, torch.empty(0, job.reply_cols, dtype=dtype, device="cpu"))

    def compute_here(self, tenant: str, call: Call, rows: Rows) -> Outcome | None:
        """Makes the reply to a small request in the calling thread on one core; returns None where it should be queued
        instead.

        No job is made for it: a decode step is a hundred such calls, and each pays for every object. Under a latency
        target one such request at a time need not wait for the end of a large product, where the replica can make it
        beside that: the operating system gives each its part of the core.
        """
        outcome = self._make_here(tenant, call, lambda replica: replica.product(call, rows))
        if outcome is not None:
            self._replies.tell(tenant, call, rows, outcome if isinstance(outcome, torch.Tensor) else None)
        return outcome

    def compute_row(self, tenant: str, call: Call, row: memoryview, reply: memoryview) -> VeilbaseError | bool:
        """Does what `compute_here` does for a call that was checked, from the bytes of one row and into those of its
        reply.

        Returns:
            The request's error; or whether the reply is written. False means that the request should be queued.
        """
        lane = self._idle() or self._beside()
        multiply = None if lane is None or self._replies.are_told else lane.replica.row_product(call)
        if multiply is None:
            return False

        # The lane that is chosen may be another: all replicas have the same weights.
        def make(_replica: Replica) -> bool:
            multiply(row, reply)
            return True

        return self._make_here(tenant, call, make) or False

    def _make_here(self, tenant: str, call: Call, make: Callable[[Replica], _Made]) -> _Made | VeilbaseError | None:
        """Makes something small in the calling thread; returns None where it may not, or the replica is lost."""
        if not self._idle() and not self._beside():
            # This looks without the lock first: a request that is wrongly sent to the queue is answered all the same.
            return None
        with self._changed:
            idle = self._idle()
            if not self._scheduler.takes_decode(tenant, time.monotonic(), idle is not None):
                return None
            lane = idle or self._beside()
            if lane is None:
                return None
            if idle:
                lane.is_busy = True
            else:
                self._is_beside = True
            self._turn += 1
        began_s, began_cpu_s = time.monotonic(), 0.0 if idle else time.thread_time()
        is_lost = False
        try:
            use_one_core()
            return make(lane.replica)
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
            self._done_here(lane, beside_s, tenant, call, began_s, is_lost)

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

    def _done_here(
        self, lane: _Lane, beside_s: float | None, tenant: str, call: Call, began_s: float, is_lost: bool
    ) -> None:
        """Args: beside_s: the processor seconds of a product beside another; None where it was alone."""
        now_s = time.monotonic()
        with self._changed:
            if beside_s is None:
                lane.is_busy = False
            else:
                self._is_beside = False
                self._beside_s += beside_s
            if is_lost:
                lane.is_lost = True  # The lane's thread does the rest.
                self._changed.notify_all()
                return
            self._scheduler.computed_elsewhere(tenant, call, began_s, now_s)
            if self._scheduler or self._orphans or lane.is_lost:
                self._changed.notify_all()
        self._meter.inline(call.group, now_s - began_s)
        self._charge(tenant, now_s - began_s if beside_s is None else beside_s)

    def cancel(self, job: Job) -> None:
        """Takes a job out of the queue, and drops its rows."""
        self._replies.cancel(job)

    def _unqueue(self, ticket: Ticket) -> None:
        with self._changed:
            self._scheduler.cancel(ticket)

    def __len__(self) -> int:
        """Returns how many requests wait."""
        with self._changed:
            return len(self._scheduler)

    def close(self) -> None:
        """Ends each thread after its present batch, and closes the replicas."""
        self.begin_close()
        with self._changed:
            lanes = list(self._lanes)
        for lane in lanes:
            if lane.thread is not None:
                lane.thread.join(timeout=_CLOSE_S)
            lane.replica.close()  # This frees a thread that waits for a replica that hangs.
            if lane.thread is not None:
                lane.thread.join(timeout=_CLOSE_S)

    def begin_close(self) -> None:
        """Tells the threads to end, without waiting for them."""
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
                self._replies.fail_all(left, FAILED)
            work = None  # Otherwise the last reply's memory would be held until the next request.

    def _run_batch(self, lane: _Lane, batch: Batch, num_losses: int) -> None:
        """Makes a batch's products, frees the replica, and only then delivers the replies.

        A thread that a reply wakes may take this core, and no request should find the replica busy for as long.
        """
        made: list[tuple[Piece, Outcome]] = []
        measured_s, has_failed = None, False
        try:
            made, measured_s = self._products(lane.replica, batch)
        except ReplicaLost as exc:
            self._lose(lane, batch, num_losses + exc.began)
            return
        except Exception as exc:  # noqa: BLE001 - as above
            _LOGGER.error("a batch failed: %s", type(exc).__name__)
            has_failed = True
        try:
            with self._changed:
                lane.is_busy = False
                if measured_s is not None:
                    self._scheduler.computed(batch, measured_s)
                self._scheduler.finished(batch, time.monotonic())
        finally:
            if has_failed:
                self._replies.fail_all([piece.ticket for piece in batch.pieces], FAILED)
            while made:  # Nothing else holds a reply once it is answered.
                self._replies.deliver(*made.pop(0))

    def _next_batch(self, lane: _Lane) -> tuple[Batch, int] | None:
        """Returns the batch that this lane is to compute, and how many replicas it has outlived; None at the end, or if
        lost."""
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
            self._replies.fail_all([piece.ticket for piece in batch.pieces], FAILED)

    def _none_left(self) -> Unavailable | None:
        """Returns the error that says why nothing can be computed, or None; the caller holds the lock."""
        if any(not lane.is_lost for lane in self._lanes):
            return None
        is_waited_for = self._is_joined and time.monotonic() - self._empty_since_s < REJOIN_S
        can_return = is_waited_for or any(lane.replica.can_return for lane in self._lanes)
        return _unavailable(RETRY_S if can_return else 0.0)

    def _is_back(self, lane: _Lane) -> bool:
        """Waits for a lost replica; meanwhile, and where it does not return, requests that no other can compute are
        refused."""
        self._refuse_all()
        try:
            is_back = lane.replica.revive(self._closing)
        except Exception as exc:  # noqa: BLE001 - the other replicas go on
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
        """Answers all that waits with an error, where no replica is left."""
        with self._changed:
            error = self._none_left()
            if error is None:
                return
            left = [piece.ticket for batch, _ in self._orphans for piece in batch.pieces] + self._scheduler.abandon()
            self._orphans.clear()
        self._replies.fail_all(left, error)

    # ---- one batch ------------------------------------------------------------------------------------------------

    def _products(self, replica: Replica, batch: Batch) -> tuple[list[tuple[Piece, Outcome]], float | None]:
        """Returns the outcome of each piece that is still wanted and was not answered, and the seconds that all rows
        took.

        The seconds are None where not every row was multiplied, or not all at once: that says nothing about how long so
        many rows take.
        """
        pieces = [piece for piece in batch.pieces if self._replies.is_good(piece, alone=len(batch.pieces) == 1)]
        parts = [(piece, rows) for piece in pieces if (rows := rows_of(piece)) is not None]
        if not parts:
            return [], None
        began_s, beside_s = time.monotonic(), self._beside_s
        made = _at_once(replica, batch.call, parts)
        # Which request was at fault shows when each runs alone; one that ends the replica spoils no other's.
        if not made:
            for piece, rows in parts:
                self._replies.deliver(piece, _alone(replica, batch.call, rows))
        seconds = time.monotonic() - began_s
        computed = [piece for piece, _ in parts]
        self._meter.batch(computed, began_s, seconds)
        # What small products took of the core does not count.
        seconds = max(0.0, seconds - (self._beside_s - beside_s))
        num_rows = sum(piece.num_rows for piece in computed)
        for piece in computed:
            self._charge(piece.ticket.tenant, seconds * piece.num_rows / num_rows)
        is_whole = bool(made) and len(parts) == len(batch.pieces)
        is_good = all(isinstance(outcome, torch.Tensor) for _, outcome in made)
        return made, seconds if is_whole and is_good else None


def _at_once(replica: Replica, call: Call, parts: Sequence[tuple[Piece, Rows]]) -> list[tuple[Piece, Outcome]]:
    """Makes one product of all rows; returns nothing where that was refused."""
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
