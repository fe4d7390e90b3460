"""Keeps the requests in flight of one stream until their replies are sent, and decides which frame the stream sends
next.

`RequestTable` has the requests in flight, from their admission until their reply is sent. `Outbox` has the frames and
replies that wait to be sent. It gives short frames in their order, and large replies in turns, one chunk each. This
module neither reads nor sends frames.

Guarantees of the table: a request both enters the table and uses the tenant's quota, or does neither. When the request
ends, by a reply, an error, a cancel, its deadline or the end of the stream, both are undone exactly once. (A single row
that is computed at once uses the quota only.) The number of requests, and the bytes of requests and replies, are
bounded. Nothing is admitted after `close`.

What is counted as used: a request whose reply is complete, and one that the tenant gives up after it may have a part of
the reply: by a cancel, by its own deadline, or by the end of its stream. Otherwise a tenant could read all but the last
chunk and owe nothing. What the provider itself drops is not counted.

Guarantees of the outbox: once a request is dropped from the table, for example by a cancel, no further chunk of its
reply is sent. A request is dropped just before the last chunk of its reply is sent, so that its bytes are no longer in
flight when the tenant has the chunk. A small reply never waits for more than one chunk of a large reply. Not
guaranteed: a bound on the number of waiting frames; callers must check `is_full`.

Threads: the thread that reads the stream admits requests. That thread, the thread that sends, the executor's worker
threads and the sweep look up and drop requests. `_lock` guards the table. A thread that holds `_lock` may take the
locks of the tenant's quota, but no other lock. Any thread may add frames to the outbox. Only the thread that sends may
call `next_frame` and `stop_sending`, and only this thread uses replies that are partly sent. The outbox has no lock,
since adding to a `deque` and taking from it are safe.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator

import torch

from provider.engine.request import Request
from provider.net.admission import TenantAdmission
from provider.schedule.quota import FULL_RETRY_S
from provider.schedule.ticket import RequestClass, allowed_by, class_of
from wire import frame
from wire.errors import QuotaExceeded, Unavailable, VeilbaseError, code_of
from wire.frame import Direction, FrameType, Header
from wire.limits import CHUNK_BYTES, MAX_DEADLINE_MS
from wire.usage import StreamTokens, UsageCounter

MAX_REQUESTS = 1 << 14
"""The most requests of a stream in flight, and the most replies and errors that wait to be sent. A bound on bytes alone
would not stop requests without rows from piling up."""


class RequestTable:
    """Holds the requests in flight of one stream."""

    def __init__(
        self,
        max_in_flight_bytes: int,
        admission: TenantAdmission,
        cancel: Callable[[Request], None],
        most_requests: int = MAX_REQUESTS,
        given_up: Callable[[Request], object] = lambda request: None,
    ) -> None:
        """Makes an empty table of requests.

        Args:
            max_in_flight_bytes: the most bytes of the stream's requests and their replies together.
            admission: the tenant's quota, which all streams of the tenant share.
            cancel: called to take a request out of the executor.
            most_requests: the most requests in flight.
            given_up: called once with each request that the tenant gives up after `begin_reply`.
        """
        self._max_bytes, self._most_requests, self._given_up = max_in_flight_bytes, most_requests, given_up
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

    def begin_reply(self, request: Request) -> bool:
        """Notes that the tenant is about to get a part of a reply. Returns False if the request is no longer in flight;
        then nothing must be sent of it."""
        with self._lock:
            if not self.has(request):
                return False
            request.is_reply_begun = True
            return True

    def expired(self, now: float) -> list[int]:
        with self._lock:
            return [number for number, request in self._requests.items() if now >= request.expires_s]

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

    def forget(self, request_id: int, then: Callable[[], object] | None = None, by_tenant: bool = False) -> bool:
        """Drops a request with its reply, takes it out of the executor, and releases its quota.

        Args:
            request_id: the id of the request.
            then: called under the lock if the request was in the table, so that a thread that finds no request with
                this id also sees the effect of `then`.
            by_tenant: whether the tenant gives the request up, so that it counts if its reply has begun.

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
        if by_tenant and request.is_reply_begun:
            self._given_up(request)
        if request.rows is not None:  # It is queued, or computed.
            self._cancel(request)
        return True

    def forget_unfinished(self) -> None:
        """Drops the requests of which chunks are missing; callers use this when no more chunks will be received."""
        with self._lock:
            unfinished = [number for number, request in self._requests.items() if request.assembler is not None]
        for number in unfinished:
            self.forget(number)

    def close(self, by_tenant: bool = True) -> None:
        """Drops all requests, and refuses further requests. Any thread may call this, even repeatedly.

        Args:
            by_tenant: see `forget`.
        """
        with self._lock:
            self.is_closed = True  # This is set under the lock, so that no request is admitted afterwards.
            numbers = list(self._requests)
        for number in numbers:
            self.forget(number, by_tenant=by_tenant)


def count_reply(usage: UsageCounter, stream: StreamTokens, request: Request) -> None:
    """Counts a request of a stream as answered."""
    asked = request.header
    usage.answered(request.request_class, asked.call, asked.rows, asked.total_bytes, request.reply_bytes, stream)


def error_frame(request_id: int, error: VeilbaseError) -> bytes:
    """Returns the frame that reports an error by its code and, if known, the time after which to retry. With id 0
    the error is about the whole stream."""
    retry_s = error.retry_s if isinstance(error, QuotaExceeded | Unavailable) else 0.0
    retry_ms = min(math.ceil(retry_s * 1000), MAX_DEADLINE_MS)
    return Header(FrameType.ERROR, request_id, deadline_ms=retry_ms, code=code_of(error)).pack()


class Outbox:
    """Holds the frames and replies that wait to be sent on one stream."""

    def __init__(
        self, table: RequestTable, count: Callable[[Request], object], most_waiting: int = MAX_REQUESTS
    ) -> None:
        """Makes an outbox in which nothing waits to be sent.

        Args:
            table: the stream's requests in flight; a request is dropped from the table when its reply is sent.
            count: counts a request as answered.
            most_waiting: the number of waiting frames and replies beyond which `is_full` is true.
        """
        self._table, self._count, self._most_waiting = table, count, most_waiting
        self.notify: Callable[[], None] = lambda: None
        """A function that is called, in any thread, when there may be a new frame to send."""
        self._waiting: deque[bytes | memoryview | Request | None] = deque()
        """The queue of what to send: frames, requests whose replies are ready, and None to mark the end."""
        self._turns: deque[tuple[Request, Iterator[bytes | memoryview]]] = deque()
        """Large replies that are partly sent, each with its remaining chunks, in the order of their turns."""
        self._has_input_ended = False
        self.is_over = False
        """True once `next_frame` will never return another frame."""

    # ---- putting ----------------------------------------------------------------------------------------------------

    def append(self, message: bytes | memoryview) -> None:
        """Adds a frame without calling `notify`; callers must call `notify` themselves."""
        self._waiting.append(message)

    def put(self, message: bytes | memoryview) -> None:
        """Adds a frame and calls `notify`."""
        self._waiting.append(message)
        self.notify()

    def put_reply(self, request: Request, reply: torch.Tensor) -> None:
        """Adds the reply to a request; drops the reply if the request is no longer in flight.

        The reply is stored in the request, so that the reply's memory is freed if the request is dropped.
        """
        request.reply = reply
        # The table is asked after the reply was stored: a thread that forgets the request takes it out of the table
        # first and then drops its reply, so that one of the two threads drops the reply in every order.
        if not self._table.has(request):
            request.reply = None
            return
        self._waiting.append(request)
        self.notify()

    def end_input(self) -> None:
        """Ends the outbox after every request in flight has a reply or an error and all replies and errors are sent."""
        self._has_input_ended = True
        self.notify()

    def end(self) -> None:
        """Ends the outbox after the frames that wait now are sent; a large reply that is partly sent is cut off."""
        self._waiting.append(None)
        self.notify()

    # ---- what waits -------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Returns whether no frame or reply waits and no reply is partly sent."""
        return not self._waiting and not self._turns

    @property
    def is_full(self) -> bool:
        """Returns whether more than `most_waiting` frames and replies wait, since the tenant does not read them."""
        return len(self._waiting) > self._most_waiting

    @property
    def num_waiting(self) -> int:
        """Returns the number of frames and replies that wait, including replies to requests that were dropped."""
        return len(self._waiting)

    @property
    def num_half_sent(self) -> int:
        """Returns the number of large replies of which some chunks have been sent."""
        return len(self._turns)

    # ---- sending ----------------------------------------------------------------------------------------------------

    def next_frame(self) -> bytes | memoryview | None:
        """Returns the frame to send next, or None if there is none at present. If `is_over` is true, there will never
        be another."""
        while not self.is_over:
            # This is checked before the queues, so that a frame which is added in between is found in the next call.
            is_done = self._has_input_ended and self._table.is_idle
            if self._waiting:
                item = self._waiting.popleft()
                if isinstance(item, Request):
                    if item.reply_bytes <= CHUNK_BYTES:
                        if (only := self._small_reply(item)) is not None:
                            return only
                        continue
                    self._turns.append((item, self._chunks(item)))
                elif item is not None:
                    return item
                else:
                    self.stop_sending()
                    break
            elif not self._turns:
                self.is_over = is_done
                return None
            if (chunk := self._next_chunk()) is not None:
                return chunk
        return None

    def stop_sending(self) -> None:
        """Drops replies that are partly sent, and ends the outbox. Only the thread that sends may call this."""
        self.is_over = True
        self._turns.clear()

    def _next_chunk(self) -> bytes | memoryview | None:
        """Returns the next chunk of the large reply whose turn it is, or None if the request was dropped."""
        request, chunks = self._turns.popleft()
        chunk = next(chunks, None)
        if chunk is not None and self._table.has(request):  # Otherwise this chunk is the last.
            self._turns.append((request, chunks))
        return chunk

    def _small_reply(self, request: Request) -> bytes | memoryview | None:
        """Returns a small reply as one frame, or None if its request was cancelled or has expired meanwhile."""
        reply = request.reply
        if reply is None:
            return None
        (message,) = frame.frames(self._header(request), frame.rows_bytes(reply, request.header.call.reply_bits))
        return message if self._is_answered(request) else None

    def _chunks(self, request: Request) -> Iterator[bytes | memoryview]:
        """Yields the frames of a large reply, and stops early if the request is no longer in flight."""
        reply, left = request.reply, request.reply_bytes
        if reply is None:
            return  # The request was cancelled or has expired.
        data = frame.rows_bytes(reply, request.header.call.reply_bits)
        del reply  # The bytes keep its memory if they lie there, and packed bytes need it no more.
        for message in frame.frames(self._header(request), data):
            left -= len(message) - frame.HEADER_BYTES
            if not self._table.begin_reply(request):
                return
            # The request is forgotten before the last chunk is sent, so that the tenant can send another request as
            # soon as it has that chunk.
            if left == 0 and not self._is_answered(request):
                return
            yield message

    def _is_answered(self, request: Request) -> bool:
        """Drops a request whose last frame is to be sent, and counts it. Returns False if it was dropped already, so
        that the tenant never gets its whole reply: then it counts only if the tenant gave it up; see `RequestTable`."""
        if not self._table.forget(request.header.request_id):
            return False
        self._count(request)
        return True

    def _header(self, request: Request) -> Header:
        """Returns the header of a reply, and removes the reply's tensor from the request. Callers must keep their own
        reference to the tensor."""
        asked, request.reply = request.header, None
        size = request.reply_bytes
        return Header(FrameType.REPLY, asked.request_id, asked.call, asked.rows, request.reply_cols, 0, size)
