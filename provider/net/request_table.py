"""The requests of one stream that were admitted and not yet answered, and what they hold.

Guarantees: a request takes its place here and its share of the tenant's quota together, or neither; whatever ends it
(its reply, an error, a cancel, its deadline, the end of the stream) gives both back, once; what the requests of a
stream hold is bounded in bytes and in number; nothing is admitted after `close`. This module reads no frames and sends
none.

Threads: the thread that reads the stream admits. That thread, the one that sends, the executor's workers and the sweep
look requests up and forget them. `_lock` guards the table; whoever holds it may take the locks of the tenant's quota,
and no other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from provider.engine.job import Job
from provider.net.admission import TenantAdmission
from provider.schedule.quota import FULL_RETRY_S
from provider.schedule.request_class import RequestClass, allowed_by, class_of
from wire import frame
from wire.errors import QuotaExceeded, Unavailable
from wire.frame import Assembler, Direction, Header

MAX_REQUESTS = 1 << 14
"""Most requests of a stream that are in flight, and most of its answers that wait to be sent: without it, empty
requests would cost nothing and add up."""


class Request:
    """A request that was admitted and not yet answered."""

    def __init__(
        self, header: Header, reply_cols: int, held_bytes: int, request_class: RequestClass, expires_at: float
    ) -> None:
        """Args: header: its first; reply_cols: numbers in a row of the reply; held_bytes: what request and reply take;
        request_class: what it counts as; expires_at: its deadline on the clock of `time.monotonic`."""
        self.header, self.reply_cols, self.held_bytes = header, reply_cols, held_bytes
        self.reply_bytes = header.rows * reply_cols * frame.ITEM_BYTES
        self.request_class, self.expires_at = request_class, expires_at
        self.assembler: Assembler | None = Assembler(header)
        """Takes the chunks; None once all have come."""
        self.job: Job | None = None
        self.reply: torch.Tensor | None = None


class RequestTable:
    """What is in flight on one stream."""

    def __init__(
        self,
        max_in_flight_bytes: int,
        admission: TenantAdmission,
        cancel: Callable[[Job], None],
        most_requests: int = MAX_REQUESTS,
    ) -> None:
        """Starts empty.

        Args:
            max_in_flight_bytes: the most bytes that the stream's requests and their replies take together.
            admission: the tenant's quota, which its streams share.
            cancel: takes a job out of the executor.
            most_requests: the most requests in flight.
        """
        self._max_bytes, self._most_requests = max_in_flight_bytes, most_requests
        self._admission, self._cancel = admission, cancel
        self._lock = threading.Lock()
        self._requests: dict[int, Request] = {}
        self._held_bytes = 0
        self._is_answering = False
        self.is_closed = False
        """Whether `close` was called; set under the lock."""

    # ---- admission --------------------------------------------------------------------------------------------------

    def class_of(self, header: Header, now: float) -> RequestClass:
        """Returns what a request counts as, beside what its tenant has in flight at this time."""
        admission = self._admission
        return class_of(header.call, header.rows, admission.num_decode, admission.is_training(now))

    def admit(
        self, header: Header, request_class: RequestClass, held_bytes: int, now: float, request: Request | None
    ) -> None:
        """Admits a request whose header passed every check.

        Args:
            header: its first header.
            request_class: see `class_of`.
            held_bytes: the bytes of request and reply.
            now: the present time.
            request: what takes the place; None for a row that the caller answers before it does anything else, and for
                which it calls `row_ended`. Nothing can ask for such a row meanwhile, so it takes no place.

        Raises:
            Unavailable: the stream has ended.
            QuotaExceeded: this stream, or its tenant, has too much in flight.
            NotPermitted, LimitExceeded: see `TenantAdmission.admit`.
        """
        with self._lock:
            if self.is_closed:  # This message was taken just before the end: what it asked for would be held for ever.
                raise Unavailable("the stream has ended")
            if self._held_bytes + held_bytes > self._max_bytes or len(self._requests) >= self._most_requests:
                raise QuotaExceeded("too much in flight", FULL_RETRY_S)
            allowed = allowed_by(header.call, request_class, header.rows)
            self._admission.admit(request_class, allowed, header.rows, held_bytes, now)
            if request is None:
                self._is_answering = True
                return
            self._keep(request)
        if header.call.direction is Direction.BACKWARD:
            self._admission.trained(now)

    def _keep(self, request: Request) -> None:
        """Puts a request in its place; the caller holds the lock."""
        self._requests[request.header.request_id] = request
        self._held_bytes += request.held_bytes

    def keep_row(self, request: Request) -> bool:
        """Gives a place to a row that was admitted without one, and that could not be answered at once.

        Returns:
            False where the stream has ended meanwhile.
        """
        with self._lock:
            if self.is_closed:
                return False
            self._keep(request)
            return True

    def row_ended(self, request_class: RequestClass, held_bytes: int, is_kept: bool) -> None:
        """Notes that a row that was admitted without a place is answered, or lost, or has a place now (`is_kept`)."""
        self._is_answering = False
        if not is_kept:
            self._admission.release(request_class, 1, held_bytes)

    # ---- what is in flight ------------------------------------------------------------------------------------------

    def get(self, request_id: int) -> Request | None:
        """Returns the request in flight of this id."""
        return self._requests.get(request_id)

    def has(self, request: Request) -> bool:
        """Tells whether this request is still in flight; another one of its id does not count."""
        return self._requests.get(request.header.request_id) is request

    def expired(self, now: float) -> list[int]:
        """Returns the ids of requests whose deadline has passed."""
        with self._lock:
            return [number for number, request in self._requests.items() if now >= request.expires_at]

    @property
    def is_idle(self) -> bool:
        """Tells whether every request has been answered, and its answer is queued."""
        with self._lock:
            return not self._requests and not self._is_answering

    def in_flight(self) -> tuple[int, int]:
        """Returns how many requests have a place, and how many bytes they and their replies take."""
        with self._lock:
            return len(self._requests), self._held_bytes

    # ---- forgetting -------------------------------------------------------------------------------------------------

    def forget(self, request_id: int, then: Callable[[], object] | None = None) -> bool:
        """Drops a request with its reply, takes its job out of the executor, and gives back what it held.

        Args:
            request_id: its id.
            then: called under the lock, if the request was there. A thread that finds no request left finds what this
                has done.

        Returns:
            False where there was no such request.
        """
        with self._lock:
            request = self._requests.pop(request_id, None)
            if request is None:
                return False
            self._held_bytes -= request.held_bytes
            if then is not None:
                then()
        self._admission.release(request.request_class, request.header.rows, request.held_bytes)
        request.reply = None
        if request.job is not None:
            self._cancel(request.job)
        return True

    def forget_unfinished(self) -> None:
        """Drops requests of which chunks are missing, since no more will come."""
        with self._lock:
            unfinished = [number for number, request in self._requests.items() if request.assembler is not None]
        for number in unfinished:
            self.forget(number)

    def close(self) -> None:
        """Drops everything. It is safe to call this twice and from any thread."""
        with self._lock:
            self.is_closed = True  # It is set under the lock, so that nothing is admitted after it.
            numbers = list(self._requests)
        for number in numbers:
            self.forget(number)
