"""One tenant's stream: frames come in, frames go out, and many requests are in flight.

Guarantees: a request's header passes every check before anything is allocated for it; a fault of one request answers
that request alone, a frame that cannot be read ends the stream; only replies are sent, and errors as numbers. When the
tenant goes, everything of the session goes. This module does not know which transport carries the frames.

Threads: the session has none of its own. `provider/net/tensor_port.py` or `provider/net/grpc_stream.py` hands messages
in, one at a time, and takes frames out, one at a time; small requests are computed where they are handed in, the rest
by the executor's worker. `_lock` guards the table.
"""

from __future__ import annotations

import logging
import math
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from provider.engine.job import Job, Outcome
from provider.net.admission import TenantAdmission
from provider.operations.usage import TenantUsage
from provider.schedule.quota import FULL_RETRY_S
from provider.schedule.request_class import RequestClass, allowed_by, class_of
from wire import frame
from wire.errors import (
    DeadlineExceeded,
    InvalidTensor,
    LimitExceeded,
    MalformedFrame,
    QuotaExceeded,
    Unavailable,
    VeilbaseError,
    VersionMismatch,
    WireCode,
    code_of,
)
from wire.frame import Assembler, Call, Direction, FrameType, Header
from wire.limits import CHUNK_BYTES, MAX_DEADLINE_MS, Limits
from wire.ring.seeded_rows import Rows

INLINE_ROWS = 8
"""Most rows of a decode request that is computed where it is read, while nothing else is computed: a step is 4 calls a
block, and each change of threads costs."""
INLINE_PRODUCTS = 1 << 23
"""Most multiplications of such a request, which take a millisecond or so."""
MAX_REQUESTS = 1 << 14
"""Most requests in flight, and most answers that wait to be sent: without it, empty requests would cost nothing and add
up."""
SWEEP_S = 0.5
"""Seconds after which, at most, a stream that only waits learns of a revocation or of a deadline."""
HANDSHAKE_S = 20.0
_END = object()
_LOGGER = logging.getLogger(__name__)


class Computes(Protocol):
    """An executor, or several behind one interface."""

    def submit(self, job: Job) -> None:
        """Queues a job; see `provider.engine.executor.Executor` for this and the other methods."""
        ...

    def compute_here(self, tenant: str, call: Call, rows: Rows) -> Outcome | None: ...

    def compute_row(self, tenant: str, call: Call, row: memoryview, reply: memoryview) -> VeilbaseError | bool: ...

    def cancel(self, job: Job) -> None: ...


class _Refused(Exception):
    """The whole stream is refused with this code."""

    def __init__(self, code: WireCode) -> None:
        self.code = code


class _Request:
    """A request that was admitted and not yet answered."""

    def __init__(
        self, header: Header, reply_cols: int, held_bytes: int, request_class: RequestClass, expires_at: float
    ) -> None:
        self.header, self.reply_cols, self.held_bytes = header, reply_cols, held_bytes
        self.reply_bytes = header.rows * reply_cols * frame.ITEM_BYTES
        self.request_class, self.expires_at = request_class, expires_at
        self.assembler: Assembler | None = Assembler(header)
        self.job: Job | None = None
        self.reply: torch.Tensor | None = None


def _is_whole_row(header: Header, payload: memoryview, request_class: RequestClass, reply_cols: int) -> bool:
    """Tells whether a request is one token's, all of it is here, and its product is small."""
    return (
        header.rows == 1
        and request_class is RequestClass.DECODE
        and len(payload) == header.total_bytes
        and not payload.readonly
        and header.cols * reply_cols <= INLINE_PRODUCTS
        and reply_cols * frame.ITEM_BYTES <= CHUNK_BYTES  # The reply is one frame.
    )


def error_frame(request_id: int, error: VeilbaseError) -> bytes:
    """Returns the frame for an error of a request, or by id 0 of the whole stream: a number, and a time where there is
    one."""
    retry_s = error.retry_s if isinstance(error, QuotaExceeded | Unavailable) else 0.0
    retry_ms = min(math.ceil(retry_s * 1000), MAX_DEADLINE_MS)
    return Header(FrameType.ERROR, request_id, deadline_ms=retry_ms, code=code_of(error)).pack()


class Session:
    """The provider's end of one stream."""

    def __init__(
        self,
        tenant: str,
        limits: Limits,
        admission: TenantAdmission,
        usage: TenantUsage,
        check: Callable[[Call, int], int],
        executor: Computes,
        refusal: Callable[[], WireCode | None],
        hang_up: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepares for the first message.

        Args:
            tenant: the name for the log and the recorder.
            limits: the limits of this stream.
            admission, usage: the tenant's, which its streams share.
            check: takes a call and its columns and returns the columns of the reply; raises `wire.errors`.
            executor: computes.
            refusal: returns why this tenant may not go on, or None; called on every request. If it raises Unavailable,
                the registry cannot be read just now, and that request alone is answered so.
            hang_up: ends the RPC from outside.

        `notify` may be set before the first message: it is called, in any thread, when there may be a frame to send.
        """
        self.tenant = tenant
        self._limits, self._admission, self._usage = limits, admission, usage
        self.stream_id = secrets.token_hex(4)
        self._check, self._executor, self._refusal = check, executor, refusal
        self._hang_up = hang_up
        self.notify: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._requests: dict[int, _Request] = {}
        self._held_bytes = 0
        self._highest_id = 0
        self._output: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._replies: deque[tuple[_Request, Iterator[bytes | memoryview]]] = deque()
        """Large replies that are being sent; only the thread that takes frames looks at them."""
        self._greeted = self._input_ended = self._closed = self._over = False
        self._draining = self._is_answering = False
        now = time.monotonic()
        self._greet_by, self._sweep_at = now + HANDSHAKE_S, now + SWEEP_S

    # ---- receiving --------------------------------------------------------------------------------------------------

    def receive(self, message: bytes | memoryview) -> bool:
        """Takes one message, from one thread at a time. Returns False when no more will be taken."""
        try:
            self._take(*frame.parse(message))
            return not self._closed
        except _Refused as exc:
            self.end(exc.code)
        except VeilbaseError as exc:
            self.end(code_of(exc))
        except Exception as exc:  # noqa: BLE001 - a stream that is no longer read must not leave the tenant waiting
            _LOGGER.error("a stream failed: %s", type(exc).__name__, extra=self._named(0))
            self.end(WireCode.INTERNAL)
        return False

    def _take(self, header: Header, payload: memoryview) -> None:
        if not self._greeted:
            self._greet(header, payload)
        elif header.kind is FrameType.REQUEST:
            self._take_request(header, payload)
        elif header.kind is FrameType.CANCEL:
            self._forget(header.request_id)
        else:
            raise MalformedFrame("the tenant sent a frame that only providers send, or a second HELLO")

    def _greet(self, header: Header, payload: memoryview) -> None:
        if header.kind is not FrameType.HELLO:
            raise MalformedFrame("expected HELLO as the first frame")
        if header.code != frame.PROTOCOL_VERSION:
            raise VersionMismatch(f"this provider speaks protocol {frame.PROTOCOL_VERSION}, the tenant {header.code}")
        if bytes(payload) != frame.MAGIC:
            raise MalformedFrame("expected VEIL in HELLO")
        self._greeted = True
        self._put(frame.hello(FrameType.WELCOME))

    def _take_request(self, header: Header, payload: memoryview) -> None:
        request = self._requests.get(header.request_id)
        if request is None:
            if header.offset:
                self._check_leftover(header)
                return
            request = self._admit_or_answer(header, payload)
            if request is None:
                return
        elif header.offset == 0:
            raise MalformedFrame("a request id that is in flight was used again")
        assembler = request.assembler
        if assembler is None:  # Only a request that came whole has none.
            raise MalformedFrame("a request id that is in flight was used again")
        if assembler.add(header, payload):
            request.assembler = None
            self._compute(request, assembler)

    def _check_leftover(self, header: Header) -> None:
        """Skips chunks of a request that was refused, cancelled or expired; other chunks here lack a first chunk."""
        if header.request_id > self._highest_id:
            raise MalformedFrame("a request must begin with its first chunk")

    def _admit_or_answer(self, header: Header, payload: memoryview) -> _Request | None:
        """Admits a request, whose first frame has this payload; returns None where it has been answered."""
        if header.request_id == 0:
            raise MalformedFrame("request id 0 is the stream itself")
        self._highest_id = max(self._highest_id, header.request_id)
        now = time.monotonic()
        if now >= self._sweep_at:
            self.sweep(now)
        try:
            code = self._refusal()
            if code is not None:
                raise _Refused(code)
            if self._draining:
                raise Unavailable("the provider is shutting down")
            return self._admit(header, payload, now)
        except VeilbaseError as exc:
            self._fail(header.request_id, exc, is_admitted=False)
            return None

    def _admit(self, header: Header, payload: memoryview, now: float) -> _Request | None:
        """Makes every check that needs the header alone, then takes a place in the table, unless it can be answered at
        once."""
        if header.deadline_ms == 0:
            raise DeadlineExceeded("a request without time to be answered in")
        reply_cols = self._check_shape(header)
        held = header.total_bytes + header.rows * reply_cols * frame.ITEM_BYTES
        expires_at = now + min(header.deadline_ms, MAX_DEADLINE_MS) / 1000
        admission = self._admission
        request_class = class_of(header.call, header.rows, admission.num_decode, admission.is_training(now))
        # This holds only where nothing waits to be sent: otherwise replies to a tenant that does not read would pile up
        # uncounted.
        is_row = _is_whole_row(header, payload, request_class, reply_cols) and self._has_sent_all()
        request = None if is_row else _Request(header, reply_cols, held, request_class, expires_at)
        with self._lock:
            if self._closed:  # This message was taken just before the end: what it asked for would be held for ever.
                raise Unavailable("the stream has ended")
            if self._held_bytes + held > self._limits.max_in_flight_bytes or len(self._requests) >= MAX_REQUESTS:
                raise QuotaExceeded("too much in flight", FULL_RETRY_S)
            allowed = allowed_by(header.call, request_class, header.rows)
            admission.admit(request_class, allowed, header.rows, held, now)
            if request is not None:
                self._keep(request)
            else:
                self._is_answering = True
        if request is None:
            return self._answer_row(header, payload, reply_cols, held, expires_at)
        if header.call.direction is Direction.BACKWARD:
            admission.trained(now)
        return request

    def _keep(self, request: _Request) -> None:
        """Puts a request into the table; the caller holds the lock."""
        self._requests[request.header.request_id] = request
        self._held_bytes += request.held_bytes

    def _has_sent_all(self) -> bool:
        return self._output.empty() and not self._replies

    def _answer_row(
        self, header: Header, row: memoryview, reply_cols: int, held: int, expires_at: float
    ) -> _Request | None:
        """Answers a token's row, which was admitted, without a place in the table: nothing can ask for it meanwhile.

        Returns:
            None; or the request, with its place, where it cannot be answered here.
        """
        size, is_kept = reply_cols * frame.ITEM_BYTES, False
        try:
            message = memoryview(bytearray(frame.HEADER_BYTES + size))
            outcome = self._executor.compute_row(self.tenant, header.call, row, message[frame.HEADER_BYTES :])
            if outcome is True:
                reply = Header(FrameType.REPLY, header.request_id, header.call, 1, reply_cols, 0, size)
                message[: frame.HEADER_BYTES] = reply.pack()
                self._usage.answered(RequestClass.DECODE, 1, header.total_bytes, size)
                self._put(message)
            elif isinstance(outcome, VeilbaseError):
                self._fail(header.request_id, outcome, is_admitted=False)
            else:
                request = _Request(header, reply_cols, held, RequestClass.DECODE, expires_at)
                with self._lock:
                    if not self._closed:
                        self._keep(request)
                        is_kept = True
                return request if is_kept else None
        finally:
            self._is_answering = False
            if not is_kept:
                self._admission.release(RequestClass.DECODE, 1, held)
        return None

    def _check_shape(self, header: Header) -> int:
        """Returns how many numbers a row of the reply has, to what the header announces."""
        reply_cols = self._check(header.call, header.cols)
        try:
            frame.check_tensor_header(header, self._limits.max_rows, self._limits.max_tensor_bytes)
        except MalformedFrame as exc:  # One request's numbers do not fit; the frames around it can be read.
            raise InvalidTensor(str(exc)) from None
        reply_bytes = header.rows * reply_cols * frame.ITEM_BYTES
        if reply_bytes > self._limits.max_tensor_bytes:
            raise LimitExceeded(f"expected a reply of at most {self._limits.max_tensor_bytes} bytes, got {reply_bytes}")
        return reply_cols

    def end_input(self) -> None:
        """Notes that no more messages will come; what is being computed is still answered."""
        with self._lock:
            unfinished = [number for number, request in self._requests.items() if request.assembler is not None]
        for number in unfinished:
            self._forget(number)
        self._input_ended = True
        self.notify()

    # ---- computing --------------------------------------------------------------------------------------------------

    def _compute(self, request: _Request, assembler: Assembler) -> None:
        header, call = request.header, request.header.call
        try:
            rows = assembler.rows()
        except VeilbaseError as exc:  # The seed does not fit its header, which is a fault of this request alone.
            self._answer(request, exc)
            return

        if (
            request.request_class is RequestClass.DECODE
            and 0 < header.rows <= INLINE_ROWS
            and header.rows * header.cols * request.reply_cols <= INLINE_PRODUCTS
        ):
            outcome = self._executor.compute_here(self.tenant, call, rows)
            if outcome is not None:
                self._answer(request, outcome)
                return

        def done(outcome: Outcome) -> None:
            self._answer(request, outcome)

        job = request.job = Job(
            call, rows, self.tenant, request.request_class, request.expires_at, done, request.reply_cols
        )
        if self._requests.get(header.request_id) is request:  # Otherwise the tenant went away since the last chunk.
            self._executor.submit(job)

    def _answer(self, request: _Request, outcome: Outcome) -> None:
        number = request.header.request_id
        if self._requests.get(number) is not request:
            return  # The request was cancelled meanwhile.
        if isinstance(outcome, VeilbaseError):
            self._fail(number, outcome)
        elif self._output.qsize() > MAX_REQUESTS:
            self._give_up()
        else:
            request.reply = outcome  # It is kept there, so that a request that is forgotten takes its reply with it.
            self._put(request)

    def _forget(self, request_id: int, last: bytes | None = None) -> bool:
        """Drops a request, and queues `last` about it if given; returns False where there was no such request."""
        with self._lock:
            request = self._requests.pop(request_id, None)
            if request is None:
                return False
            self._held_bytes -= request.held_bytes
            if last is not None:
                self._output.put(last)  # This is under the lock: a thread that finds no request left finds this frame.
        self._admission.release(request.request_class, request.header.rows, request.held_bytes)
        request.reply = None
        if request.job is not None:
            self._executor.cancel(request.job)
        return True

    def sweep(self, now: float) -> None:
        """Drops what has expired; ends a stream whose tenant was revoked, or that never sent HELLO."""
        self._sweep_at = now + SWEEP_S
        if self._closed:
            self._hang_up()  # The thread that sends is held by a tenant that does not read.
            return
        with self._lock:
            expired = [number for number, request in self._requests.items() if now >= request.expires_at]
        for number in expired:
            self._fail(number, DeadlineExceeded("not answered in time"))
        try:
            code = self._refusal()
        except Unavailable:
            code = None  # The registry may be back in a moment, and until then every request is refused.
        if code is None and not self._greeted and now >= self._greet_by:
            code = WireCode.MALFORMED
        if code is not None:
            self.end(code)

    # ---- sending ----------------------------------------------------------------------------------------------------

    def _put(self, item: object) -> None:
        self._output.put(item)
        self.notify()

    @property
    def is_over(self) -> bool:
        """Tells whether `next_frame` will never return another frame."""
        return self._over

    def next_frame(self) -> bytes | memoryview | None:
        """Returns the frame to send next, or None where there is none now; one thread at a time calls this.

        Large replies take turns, a chunk each. `notify` is called when there may be a frame again.
        """
        while not self._over:
            ended = self._input_ended and self.is_idle  # This comes before the queue is seen to be empty.
            item = None if self._output.empty() else self._output.get()
            if isinstance(item, bytes | memoryview):
                return item
            if isinstance(item, _Request):
                if item.reply_bytes <= CHUNK_BYTES:
                    if (only := self._small_reply(item)) is not None:
                        return only
                    continue
                self._replies.append((item, self._reply_frames(item)))
            if item is _END or (ended and item is None and not self._replies):
                self._over = True
            elif self._replies:
                request, frames = self._replies.popleft()
                chunk = next(frames, None)
                if chunk is not None:
                    if self._requests.get(request.header.request_id) is request:  # Otherwise that was the last chunk.
                        self._replies.append((request, frames))
                    return chunk
            else:
                return None
        self._replies.clear()
        return None

    def stop_sending(self) -> None:
        """Drops replies that are half sent; called by the thread that takes frames, which will take no more."""
        self._over = True
        self._replies.clear()

    def _small_reply(self, request: _Request) -> bytes | memoryview | None:
        """Returns the one frame of a reply; None where the request was cancelled or expired before its turn."""
        reply = request.reply
        if reply is None:
            return None
        (message,) = frame.frames(self._answered(request), frame.tensor_bytes(reply))
        return message if self._forget(request.header.request_id) else None

    def _answered(self, request: _Request) -> Header:
        """Returns the header of the reply, and counts it; from here on the caller holds the reply."""
        asked, size = request.header, request.reply_bytes
        self._usage.answered(request.request_class, asked.rows, asked.total_bytes, size)
        request.reply = None
        return Header(FrameType.REPLY, asked.request_id, asked.call, asked.rows, request.reply_cols, 0, size)

    def _reply_frames(self, request: _Request) -> Iterator[bytes | memoryview]:
        asked, reply = request.header, request.reply
        if reply is None:
            return  # The request was cancelled, or expired before its turn.
        left = request.reply_bytes
        for message in frame.frames(self._answered(request), frame.tensor_bytes(reply)):
            left -= len(message) - frame.HEADER_BYTES
            if self._requests.get(asked.request_id) is not request:
                return
            if left == 0:
                # It is released before the last chunk is sent: the tenant may use the room as soon as it has that
                # chunk.
                self._forget(asked.request_id)
            yield message

    def _fail(self, request_id: int, error: VeilbaseError, is_admitted: bool = True) -> None:
        """Answers a request with an error: one in the table, unless it has ended, or one that never was in it."""
        code = code_of(error)
        if code is WireCode.INTERNAL:  # The tenant is told to ask for this line, so it comes first.
            _LOGGER.error("a request failed", extra=self._named(request_id))
        last = error_frame(request_id, error)
        if not is_admitted:
            self._output.put(last)
        elif not self._forget(request_id, last):
            return
        self._usage.failed(code)
        if self._output.qsize() > MAX_REQUESTS:
            self._give_up()
        self.notify()

    def _named(self, request_id: int) -> dict[str, object]:
        """Returns the fields that tell the log which request of which stream this is."""
        return {"tenant": self.tenant, "stream": self.stream_id, "request": request_id}

    def _give_up(self) -> None:
        """Ends a stream whose tenant asks and does not read."""
        self.end(WireCode.QUOTA)
        self._hang_up()

    @property
    def is_idle(self) -> bool:
        """Tells whether every request has been answered, and its answer is queued."""
        with self._lock:
            return not self._requests and not self._is_answering

    def drain(self) -> None:
        """Refuses new requests from now on; those that are here are answered."""
        self._draining = True

    def end(self, code: WireCode) -> None:
        """Ends the stream with one error about all of it."""
        self._usage.failed(code)
        self._output.put(Header(FrameType.ERROR, 0, code=code).pack())
        self.close()

    def close(self) -> None:
        """Drops everything. It is safe to call this twice and from any thread."""
        with self._lock:
            self._closed = True  # It is set under the lock, so that nothing is admitted after it.
            numbers = list(self._requests)
        for number in numbers:
            self._forget(number)
        self._put(_END)
