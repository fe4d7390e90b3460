"""The protocol of one tenant's stream: what each of its frames means, and what a fault of one brings about.

Guarantees: a request's header passes every check before anything is allocated for it; a fault of one request answers
that request alone, a frame that cannot be read ends the stream; only replies are sent, and errors as numbers. When the
tenant goes, everything of the session goes. This module does not know which transport carries the frames. What is in
flight is kept by `provider.net.request_table`, and what is to be sent by `provider.net.outbox`.

Threads: the session has none of its own. `provider/net/tensor_port.py` or `provider/net/grpc_stream.py` hands messages
in, one at a time, and takes frames out, one at a time; small requests are computed where they are handed in, the rest
by the executor's worker, which hands its outcomes in. The sweep of `provider/net/service.py`, and whoever drains or
ends the stream, come in other threads. There is no lock here: the table has one.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable
from typing import Protocol

from provider.engine.job import Job, Outcome
from provider.net.admission import TenantAdmission
from provider.net.outbox import Outbox
from provider.net.request_table import MAX_REQUESTS, Request, RequestTable
from provider.net.status import SessionStatus
from provider.operations.usage import TenantUsage
from provider.schedule.request_class import RequestClass
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
from wire.frame import Assembler, Call, FrameType, Header
from wire.limits import CHUNK_BYTES, MAX_DEADLINE_MS, Limits
from wire.ring.seeded_rows import Rows

INLINE_ROWS = 8
"""Most rows of a decode request that is computed where it is read, while nothing else is computed: a step is 4 calls a
block, and each change of threads costs."""
INLINE_PRODUCTS = 1 << 23
"""Most multiplications of such a request, which take a millisecond or so."""
SWEEP_S = 0.5
"""Seconds after which, at most, a stream that only waits learns of a revocation or of a deadline."""
HANDSHAKE_S = 20.0
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
        """
        self.tenant = tenant
        self.stream_id = secrets.token_hex(4)
        self._limits, self._usage = limits, usage
        self._check, self._executor, self._refusal = check, executor, refusal
        self._hang_up = hang_up
        self._table = RequestTable(limits.max_in_flight_bytes, admission, executor.cancel, MAX_REQUESTS)
        self._outbox = Outbox(self._table, usage, MAX_REQUESTS)
        self._highest_id = 0
        self._has_greeted = self._is_draining = False
        now = time.monotonic()
        self._greet_by, self._sweep_at = now + HANDSHAKE_S, now + SWEEP_S

    @property
    def notify(self) -> Callable[[], None]:
        """What is called, in any thread, when there may be a frame to send; whoever carries the frames sets it."""
        return self._outbox.notify

    @notify.setter
    def notify(self, notify: Callable[[], None]) -> None:
        self._outbox.notify = notify

    # ---- frames that come -------------------------------------------------------------------------------------------

    def receive(self, message: bytes | memoryview) -> bool:
        """Takes one message, from one thread at a time. Returns False when no more will be taken."""
        try:
            self._take(*frame.parse(message))
            return not self._table.is_closed
        except _Refused as exc:
            self.end(exc.code)
        except VeilbaseError as exc:
            self.end(code_of(exc))
        except Exception as exc:  # noqa: BLE001 - a stream that is no longer read must not leave the tenant waiting
            _LOGGER.error("a stream failed: %s", type(exc).__name__, extra=self._named(0))
            self.end(WireCode.INTERNAL)
        return False

    def _take(self, header: Header, payload: memoryview) -> None:
        if not self._has_greeted:
            self._greet(header, payload)
        elif header.kind is FrameType.REQUEST:
            self._take_request(header, payload)
        elif header.kind is FrameType.CANCEL:
            self._table.forget(header.request_id)
        else:
            raise MalformedFrame("the tenant sent a frame that only providers send, or a second HELLO")

    def _greet(self, header: Header, payload: memoryview) -> None:
        if header.kind is not FrameType.HELLO:
            raise MalformedFrame("expected HELLO as the first frame")
        if header.code != frame.PROTOCOL_VERSION:
            raise VersionMismatch(f"this provider speaks protocol {frame.PROTOCOL_VERSION}, the tenant {header.code}")
        if bytes(payload) != frame.MAGIC:
            raise MalformedFrame("expected VEIL in HELLO")
        self._has_greeted = True
        self._outbox.put(frame.hello(FrameType.WELCOME))

    def _take_request(self, header: Header, payload: memoryview) -> None:
        request = self._table.get(header.request_id)
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

    def _admit_or_answer(self, header: Header, payload: memoryview) -> Request | None:
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
            if self._is_draining:
                raise Unavailable("the provider is shutting down")
            return self._admit(header, payload, now)
        except VeilbaseError as exc:
            self._fail(header.request_id, exc, is_admitted=False)
            return None

    def _admit(self, header: Header, payload: memoryview, now: float) -> Request | None:
        """Makes every check that needs the header alone, then takes a place in the table, unless it can be answered at
        once."""
        if header.deadline_ms == 0:
            raise DeadlineExceeded("a request without time to be answered in")
        reply_cols = self._check_shape(header)
        held = header.total_bytes + header.rows * reply_cols * frame.ITEM_BYTES
        expires_at = now + min(header.deadline_ms, MAX_DEADLINE_MS) / 1000
        request_class = self._table.class_of(header, now)
        # This holds only where nothing waits to be sent: otherwise replies to a tenant that does not read would pile up
        # uncounted.
        is_row = _is_whole_row(header, payload, request_class, reply_cols) and self._outbox.is_empty
        request = None if is_row else Request(header, reply_cols, held, request_class, expires_at)
        self._table.admit(header, request_class, held, now, request)
        return request or self._answer_row(header, payload, reply_cols, held, expires_at)

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
        self._table.forget_unfinished()
        self._outbox.end_input()

    # ---- computing --------------------------------------------------------------------------------------------------

    def _answer_row(
        self, header: Header, row: memoryview, reply_cols: int, held: int, expires_at: float
    ) -> Request | None:
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
                self._outbox.put(message)
            elif isinstance(outcome, VeilbaseError):
                self._fail(header.request_id, outcome, is_admitted=False)
            else:
                request = Request(header, reply_cols, held, RequestClass.DECODE, expires_at)
                is_kept = self._table.keep_row(request)
                return request if is_kept else None
        finally:
            self._table.row_ended(RequestClass.DECODE, held, is_kept)
        return None

    def _compute(self, request: Request, assembler: Assembler) -> None:
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
        if self._table.has(request):  # Otherwise the tenant went away since the last chunk.
            self._executor.submit(job)

    def _answer(self, request: Request, outcome: Outcome) -> None:
        if not self._table.has(request):
            return  # The request was cancelled meanwhile.
        if isinstance(outcome, VeilbaseError):
            self._fail(request.header.request_id, outcome)
        elif self._outbox.is_full:
            self._give_up()
        else:
            self._outbox.put_reply(request, outcome)

    # ---- faults and ends --------------------------------------------------------------------------------------------

    def _fail(self, request_id: int, error: VeilbaseError, is_admitted: bool = True) -> None:
        """Answers a request with an error: one in the table, unless it has ended, or one that never was in it."""
        code = code_of(error)
        if code is WireCode.INTERNAL:  # The tenant is told to ask for this line, so it comes first.
            _LOGGER.error("a request failed", extra=self._named(request_id))
        last = error_frame(request_id, error)
        if not is_admitted:
            self._outbox.append(last)
        elif not self._table.forget(request_id, then=lambda: self._outbox.append(last)):
            return
        self._usage.failed(code)
        if self._outbox.is_full:
            self._give_up()
        self._outbox.notify()

    def _named(self, request_id: int) -> dict[str, object]:
        """Returns the fields that tell the log which request of which stream this is."""
        return {"tenant": self.tenant, "stream": self.stream_id, "request": request_id}

    def _give_up(self) -> None:
        """Ends a stream whose tenant asks and does not read."""
        self.end(WireCode.QUOTA)
        self._hang_up()

    def sweep(self, now: float) -> None:
        """Drops what has expired; ends a stream whose tenant was revoked, or that never sent HELLO."""
        self._sweep_at = now + SWEEP_S
        if self._table.is_closed:
            self._hang_up()  # The thread that sends is held by a tenant that does not read.
            return
        for number in self._table.expired(now):
            self._fail(number, DeadlineExceeded("not answered in time"))
        try:
            code = self._refusal()
        except Unavailable:
            code = None  # The registry may be back in a moment, and until then every request is refused.
        if code is None and not self._has_greeted and now >= self._greet_by:
            code = WireCode.MALFORMED
        if code is not None:
            self.end(code)

    def drain(self) -> None:
        """Refuses new requests from now on; those that are here are answered."""
        self._is_draining = True

    def end(self, code: WireCode) -> None:
        """Ends the stream with one error about all of it."""
        self._usage.failed(code)
        self._outbox.append(Header(FrameType.ERROR, 0, code=code).pack())
        self.close()

    def close(self) -> None:
        """Drops everything. It is safe to call this twice and from any thread."""
        self._table.close()
        self._outbox.end()

    # ---- frames that go, and what is here ---------------------------------------------------------------------------

    def next_frame(self) -> bytes | memoryview | None:
        """Returns the frame to send next, or None where there is none now; one thread at a time calls this.

        Large replies take turns, a chunk each. `notify` is called when there may be a frame again.
        """
        return self._outbox.next_frame()

    @property
    def is_over(self) -> bool:
        """Tells whether `next_frame` will never return another frame."""
        return self._outbox.is_over

    def stop_sending(self) -> None:
        """Drops replies that are half sent; called by the thread that takes frames, which will take no more."""
        self._outbox.stop_sending()

    @property
    def is_idle(self) -> bool:
        """Tells whether every request has been answered, and its answer is queued."""
        return self._table.is_idle

    def status(self) -> SessionStatus:
        """Returns what is in flight and what waits, from any thread; it keeps the stream up for a moment only."""
        num_requests, held_bytes = self._table.in_flight()
        return SessionStatus(
            num_requests=num_requests,
            held_bytes=held_bytes,
            num_waiting=self._outbox.num_waiting,
            num_half_sent=self._outbox.num_half_sent,
            is_idle=self._table.is_idle,
            has_greeted=self._has_greeted,
            is_draining=self._is_draining,
            is_closed=self._table.is_closed,
            is_over=self._outbox.is_over,
        )
