"""Keeps the requests in flight of one stream, from their admission until their reply is sent.

Guarantees: a request both enters the table and uses the tenant's quota, or does neither. When the request ends, by a
reply, an error, a cancel, its deadline or the end of the stream, both are undone exactly once. The number of
requests, and the bytes of requests and replies, are bounded. Nothing is admitted after `close`. This module neither
reads nor sends frames.

Threads: the thread that reads the stream admits requests. That thread, the thread that sends, the executor's worker
threads and the sweep look up and drop requests. `_lock` guards the table. A thread that holds `_lock` may take the
locks of the tenant's quota, but no other lock.
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
from wire.gpu_window.areas import Area

MAX_REQUESTS = 1 << 14
"""The most requests of a stream in flight, and the most replies and errors that wait to be sent. A bound on bytes alone
would not stop requests without rows from piling up."""


class Request:
    """Holds a request in flight: its header, the chunks received so far, and then its job or its reply."""

    def __init__(
        self,
        header: Header,
        reply_cols: int,
        held_bytes: int,
        request_class: RequestClass,
        expires_at: float,
        area: Area | None = None,
    ) -> None:
        """Makes a request of which no chunk has been received yet.

        Args:
            header: the header of the request's first frame.
            reply_cols: the number of columns of the reply.
            held_bytes: the bytes of the request and its reply together.
            request_class: the class that the request counts as.
            expires_at: the deadline, in seconds of `time.monotonic`.
            area: the request's place in the stream's window; None if its rows come in frames.
        """
        self.area = area
        self.header, self.reply_cols, self.held_bytes = header, reply_cols, held_bytes
        self.reply_bytes = header.rows * reply_cols * frame.ITEM_BYTES
        self.request_class, self.expires_at = request_class, expires_at
        self.assembler: Assembler | None = Assembler(header)
        """Joins the request's chunks into rows; None once all chunks are received."""
        self.job: Job | None = None
        self.reply: torch.Tensor | None = None


class RequestTable:
    """Holds the requests in flight of one stream."""

    def __init__(
        self,
        max_in_flight_bytes: int,
        admission: TenantAdmission,
        cancel: Callable[[Job], None],
        most_requests: int = MAX_REQUESTS,
    ) -> None:
        """Makes an empty table of requests.

        Args:
            max_in_flight_bytes: the most bytes of the stream's requests and their replies together.
            admission: the tenant's quota, which all streams of the tenant share.
            cancel: called to take a job out of the executor.
            most_requests: the most requests in flight.
        """
        self._max_bytes, self._most_requests = max_in_flight_bytes, most_requests
        self._admission, self._cancel = admission, cancel
        self._lock = threading.Lock()
        self._requests: dict[int, Request] = {}
        self._held_bytes = 0
        self._is_answering = False
        self.is_closed = False
        """True once `close` was called; changed under the lock only."""

    # ---- admission --------------------------------------------------------------------------------------------------

    def class_of(self, header: Header, now: float) -> RequestClass:
        """Returns the class of work of a request, which also depends on the tenant's other requests in flight."""
        admission = self._admission
        return class_of(header.call, header.rows, admission.num_decode, admission.is_training(now))

    def admit(
        self, header: Header, request_class: RequestClass, held_bytes: int, now: float, request: Request | None
    ) -> None:
        """Admits a request whose header passed every check.

        Args:
            header: the header of the request's first frame.
            request_class: the class of the request; see `class_of`.
            held_bytes: the bytes of the request and its reply together.
            now: the present time in seconds.
            request: the request to put into the table; None for a single row that the calling thread computes at once.
                Such a row stays out of the table, and the caller must call `row_ended` after it.

        Raises:
            Unavailable: the stream has ended.
            QuotaExceeded: the stream or the tenant has too much in flight.
            NotPermitted, LimitExceeded: see `TenantAdmission.admit`.
        """
        with self._lock:
            if self.is_closed:  # A request that is admitted after `close` would never be forgotten.
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
        """Adds a request to the table and its bytes to the total. Callers must hold the lock."""
        self._requests[request.header.request_id] = request
        self._held_bytes += request.held_bytes

    def keep_row(self, request: Request) -> bool:
        """Adds the request of a row that `admit` left out of the table and that could not be computed at once.

        Returns:
            True if the request was added; False if the stream has ended in the meantime.
        """
        with self._lock:
            if self.is_closed:
                return False
            self._keep(request)
            return True

    def row_ended(self, request_class: RequestClass, held_bytes: int, is_kept: bool) -> None:
        """Records that a row that `admit` left out of the table is no longer being computed outside the table. Releases
        the row's quota, unless `is_kept` says that `keep_row` has put the row's request into the table."""
        self._is_answering = False
        if not is_kept:
            self._admission.release(request_class, 1, held_bytes)

    # ---- what is in flight ------------------------------------------------------------------------------------------

    def get(self, request_id: int) -> Request | None:
        """Returns the request in flight with this id, or None."""
        return self._requests.get(request_id)

    def has(self, request: Request) -> bool:
        """Returns whether this request object is still in flight; another request with the same id does not count."""
        return self._requests.get(request.header.request_id) is request

    def expired(self, now: float) -> list[int]:
        """Returns the ids of requests whose deadline has passed."""
        with self._lock:
            return [number for number, request in self._requests.items() if now >= request.expires_at]

    @property
    def is_idle(self) -> bool:
        """Returns whether no request is in flight and no row is being computed outside the table."""
        with self._lock:
            return not self._requests and not self._is_answering

    def in_flight(self) -> tuple[int, int]:
        """Returns the number of requests in the table, and the bytes of these requests and their replies."""
        with self._lock:
            return len(self._requests), self._held_bytes

    # ---- forgetting -------------------------------------------------------------------------------------------------

    def forget(self, request_id: int, then: Callable[[], object] | None = None) -> bool:
        """Drops a request with its reply, takes the request's job out of the executor, and releases its quota.

        Args:
            request_id: the id of the request.
            then: called under the lock if the request was in the table, so that a thread that finds no request with
                this id also sees the effect of `then`.

        Returns:
            True if the request was dropped; False if the table has no such request.
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
        """Drops the requests of which chunks are missing; callers use this when no more chunks will be received."""
        with self._lock:
            unfinished = [number for number, request in self._requests.items() if request.assembler is not None]
        for number in unfinished:
            self.forget(number)

    def close(self) -> None:
        """Drops all requests, and refuses further requests. Any thread may call this, even repeatedly."""
        with self._lock:
            self.is_closed = True  # This is set under the lock, so that no request is admitted afterwards.
            numbers = list(self._requests)
        for number in numbers:
            self.forget(number)
