"""Implements the protocol of one tenant's stream: reads the tenant's requests, has them computed, and sends replies.

`provider/net/requests.py` keeps the requests in flight and the frames to send. This module does not know which
transport carries the frames. A status describes one stream or all of them at one time, for the log, for metrics and for
tests: counts, bytes and callers' names.

Guarantees: a request's header passes every check before memory is allocated for the request. If a request is invalid,
only that request fails; a frame that cannot be read ends the stream. Errors are sent as numbers, without text. When the
tenant disconnects, all memory of the session is freed. A status is a copy that does not change, and making one delays
the stream's thread only while a few numbers are read.

Not guaranteed: that the numbers of a status are from the same time, since the streams continue meanwhile.

Threads: the session has no thread of its own. A carrier (`provider/net/carrier.py`) hands in one message at a time, and
takes out one frame at a time. The thread that hands in a small decode request computes it at once if a replica is free.
The executor's worker threads compute the other requests, and hand in the outcomes. Further threads call `drain`, which
refuses new requests before the provider ends; `sweep`, which looks for deadlines that have passed and tenants that were
revoked; and `close`. The table of requests has the only lock. Any thread may ask for a status and use it.
"""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from provider.engine.executor import FAILED, Computes
from provider.engine.request import Outcome, Request
from provider.identity.revocations import RegistryUnreadable
from provider.net.admission import UNREADABLE, TenantAdmission
from provider.net.requests import MAX_REQUESTS, Outbox, RequestTable, count_reply, error_frame
from provider.net.windows import Window
from provider.operations.logs import RefusalLog
from provider.schedule.ticket import RequestClass
from wire import frame
from wire.errors import (
    DeadlineExceeded,
    InvalidTensor,
    LimitExceeded,
    MalformedFrame,
    Unavailable,
    UnknownLayer,
    VeilbaseError,
    VersionMismatch,
    WireCode,
    code_of,
)
from wire.frame import Call, FrameType, Header
from wire.gpu_window.memory import Area
from wire.limits import CHUNK_BYTES, MAX_DEADLINE_MS, Limits
from wire.ring import widths
from wire.ring.seeded_rows import Rows
from wire.usage import StreamTokens, UsageCounter


@dataclass(frozen=True)
class SessionStatus:
    """Describes the present state of one stream.

    Attributes:
        num_requests: number of requests in flight, except single rows that the receiving thread computes at once.
        held_bytes: bytes of these requests and their replies.
        num_waiting: number of frames and replies that wait to be sent.
        num_half_sent: number of large replies of which some chunks have been sent.
        is_idle: whether no request is in flight.
        has_greeted: whether the tenant has sent its HELLO.
        is_draining: whether new requests are refused.
        is_closed: whether the session has ended, so that it takes no more messages.
        is_over: whether no further frame will be sent.
    """

    num_requests: int
    held_bytes: int
    num_waiting: int
    num_half_sent: int
    is_idle: bool
    has_greeted: bool
    is_draining: bool
    is_closed: bool
    is_over: bool


@dataclass(frozen=True)
class ServiceStatus:
    """Describes all streams of a provider.

    Attributes:
        num_streams: number of open streams.
        num_tenants: number of tenants with an open stream.
        num_unanswered: number of streams with a request in flight.
        num_requests, held_bytes, num_waiting: sums over all streams; see `SessionStatus`.
        num_rows: rows in flight of all tenants with an open stream, including rows that the receiving thread computes.
        calls: by caller's name, the number of open streams and downloads; only callers with at least one.
        is_draining: whether new streams and requests are refused.
    """

    num_streams: int
    num_tenants: int
    num_unanswered: int
    num_requests: int
    num_rows: int
    held_bytes: int
    num_waiting: int
    calls: Mapping[str, int]
    is_draining: bool


_PROVIDERS_OWN = {WireCode.INTERNAL, WireCode.UNAVAILABLE, WireCode.UNAUTHENTICATED, WireCode.NOT_PERMITTED}
"""The codes with which the provider ends a stream for a reason of its own. Other codes are the tenant's doing."""
INLINE_ROWS = 8
"""The most rows of a decode request that the receiving thread computes itself, if `Executor.compute_here` finds a
replica for it. A decode step has four calls per block of the model, and in each call a change of threads would cost
time."""
INLINE_PRODUCTS = 1 << 23
"""The most multiplications of a request that the receiving thread computes itself, about a millisecond of work."""
SWEEP_S = 0.5
"""The seconds between two checks of a stream for a revocation and for deadlines that have passed."""
HANDSHAKE_S = 20.0
STOPPING = "the provider is shutting down"
"""The reason, in the log, of a refusal during a drain."""
_WHY_REQUEST = {
    WireCode.INVALID_TENSOR: "a tensor has a wrong shape, type or byte count, or is not finite",
    WireCode.UNKNOWN_LAYER: "it asked for a layer, direction or arithmetic that is not served",
    WireCode.LIMIT: "a request is larger than its limits",
    WireCode.NOT_PERMITTED: "its limits do not allow this class of work",
    WireCode.QUOTA: "it is over its quota",
    WireCode.DEADLINE: "a request's deadline has passed",
    WireCode.UNAVAILABLE: "a request could not be computed now: a shard is lost, or a device is full",
    WireCode.MALFORMED: "a request cannot be read",
}
_WHY_STREAM = {
    WireCode.VERSION: "it speaks another version of the protocol",
    WireCode.MALFORMED: "its stream has a frame that cannot be read, or began without HELLO",
    WireCode.QUOTA: "it sends requests and does not read the replies",
}
"""The reasons, in the log, for which one request fails and for which a stream ends. Of what is in neither table, the
cause is logged where it is found."""
_LOGGER = logging.getLogger(__name__)


class _Refused(Exception):
    """Says that the whole stream is refused, and with which error code."""

    def __init__(self, code: WireCode) -> None:
        self.code = code


def _is_whole_row(header: Header, payload: memoryview, request_class: RequestClass, reply_cols: int) -> bool:
    """Returns whether a request is a single decode row that was received as a whole, in memory that can be written to,
    and has a small product and a reply of one frame."""
    return (
        header.rows == 1
        and request_class is RequestClass.DECODE
        and len(payload) == header.total_bytes
        and not payload.readonly
        and header.cols * reply_cols <= INLINE_PRODUCTS
        and reply_cols * frame.ITEM_BYTES <= CHUNK_BYTES  # The reply is one frame, whatever its width.
    )


class Session:
    """Implements the provider's side of the protocol on one tenant's stream."""

    def __init__(
        self,
        tenant: str,
        limits: Limits,
        admission: TenantAdmission,
        usage: UsageCounter,
        check: Callable[[Call, int], int],
        executor: Computes,
        refusal: Callable[[], WireCode | None],
        hang_up: Callable[[], object] = lambda: None,
        window: Window | None = None,
        refusals: RefusalLog | None = None,
    ) -> None:
        """Makes a session that has not received any message yet.

        Args:
            tenant: the tenant's name, for the log and the recorder.
            limits: the limits of this stream.
            admission, usage: the tenant's quota and usage, which all streams of the tenant share.
            check: checks a call and the number of columns of its rows, and returns the number of columns of the reply;
                raises errors of `wire.errors`.
            executor: computes the products.
            refusal: called for every request; returns None, or the code with which the stream is refused. If it raises
                Unavailable, since the registry cannot be read, only that request fails.
            hang_up: ends the connection from any thread.
            window: device memory that the tenant shares, in which rows and replies may be; None if there is none.
            refusals: the log of refusals; None makes a new one.
        """
        self._window, self._refusals = window, refusals or RefusalLog()
        self.tenant = tenant
        self.stream_id = secrets.token_hex(4)
        self._limits, self._usage, self._tokens = limits, usage, StreamTokens()
        self._count = functools.partial(count_reply, usage, self._tokens)
        self._check, self._executor, self._refusal = check, executor, refusal
        self._hang_up = hang_up
        self._table = RequestTable(limits.max_in_flight_bytes, admission, executor.cancel, MAX_REQUESTS, self._count)
        self._outbox = Outbox(self._table, self._count, MAX_REQUESTS)
        self._highest_id = 0
        self._has_greeted = self._is_draining = False
        now = time.monotonic()
        self._greet_by, self._sweep_at = now + HANDSHAKE_S, now + SWEEP_S

    @property
    def notify(self) -> Callable[[], None]:
        """Returns the function that is called, in any thread, when there may be a frame to send."""
        return self._outbox.notify

    @notify.setter
    def notify(self, notify: Callable[[], None]) -> None:
        self._outbox.notify = notify

    # ---- frames that come -------------------------------------------------------------------------------------------

    def receive(self, message: bytes | memoryview) -> bool:
        """Handles one message. Returns False if the session accepts no further message. One thread at a time may call
        this method."""
        try:
            self._take(*frame.parse(message))
            return not self._table.is_closed
        except _Refused as exc:
            self.end(exc.code)
        except VeilbaseError as exc:
            self.end(code_of(exc))
        except Exception as exc:  # noqa: BLE001 - the tenant must learn that its stream is no longer read
            _LOGGER.error("a stream failed: %s", type(exc).__name__, extra=self._named(0))
            self.end(WireCode.INTERNAL)
        return False

    def _take(self, header: Header, payload: memoryview) -> None:
        if not self._has_greeted:
            self._greet(header, payload)
        elif header.kind is FrameType.REQUEST:
            self._take_request(header, payload)
        elif header.kind is FrameType.CANCEL:
            self._table.forget(header.request_id, by_tenant=True)
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
        window = self._window
        if request.area is not None and assembler is not None:
            request.assembler = None
            if window is not None:  # Otherwise the stream has ended.
                self._compute(request, window.rows(header, request.area))
            return
        if assembler is None:  # All of its chunks were received.
            raise MalformedFrame("a request id that is in flight was used again")
        if assembler.add(header, payload):
            request.assembler = None
            try:
                rows = assembler.rows()
            except VeilbaseError as exc:  # The seed does not fit the header, so only this request fails.
                self._answer(request, exc)
                return
            self._compute(request, rows)

    def _check_leftover(self, header: Header) -> None:
        """Ignores a later chunk of a request that was refused, cancelled or expired; raises MalformedFrame if the
        request's first chunk was never received."""
        if header.request_id > self._highest_id:
            raise MalformedFrame("a request must begin with its first chunk")

    def _admit_or_answer(self, header: Header, payload: memoryview) -> Request | None:
        """Admits a request by its first frame and returns it; returns None if it was computed at once or has failed."""
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
        """Makes all checks that need only the header, puts the request into the table, and returns the request. A
        single decode row is computed at once if possible; then this method returns None."""
        if header.deadline_ms == 0:
            raise DeadlineExceeded("a request without time to be answered in")
        reply_cols = self._check_shape(header)
        area = self._area_of(header, payload, reply_cols)
        held = frame.held_bytes(header.call, header.rows, header.cols, reply_cols)
        expires_s = now + min(header.deadline_ms, MAX_DEADLINE_MS) / 1000
        request_class = self._table.class_of(header, now)
        # A row is computed outside the table only if nothing waits to be sent. Otherwise replies to a tenant that does
        # not read would pile up without being counted.
        is_row = area is None and _is_whole_row(header, payload, request_class, reply_cols) and self._outbox.is_empty
        request = None
        if not is_row:
            request = Request(self.tenant, header, reply_cols, request_class, expires_s, self._answer, area)
        self._table.admit(header, request_class, held, now, request)
        return request or self._answer_row(header, payload, reply_cols, held, expires_s)

    def _check_shape(self, header: Header) -> int:
        """Checks the shape that a header announces against the limits; returns the number of columns of the reply."""
        if model := header.code & ~frame.IN_WINDOW:
            raise UnknownLayer(f"expected model 0, the only one, got {model}")
        reply_cols = self._check(header.call, header.cols)
        try:
            frame.check_tensor_header(header, self._limits.max_rows, self._limits.max_tensor_bytes)
        except MalformedFrame as exc:  # Only this request fails; the stream can still be read.
            raise InvalidTensor(str(exc)) from None
        reply_bytes = header.rows * reply_cols * frame.ITEM_BYTES
        if reply_bytes > self._limits.max_tensor_bytes:
            raise LimitExceeded(f"expected a reply of at most {self._limits.max_tensor_bytes} bytes, got {reply_bytes}")
        return reply_cols

    def _area_of(self, header: Header, payload: memoryview, reply_cols: int) -> Area | None:
        """Returns the place of a request in the window, or None if its rows come in frames."""
        if header.code != frame.IN_WINDOW:
            return None
        if self._window is None:
            raise _Refused(WireCode.MALFORMED)
        return self._window.area_of(header, payload, reply_cols)

    def end_input(self) -> None:
        """Ends the input, since no message will be received any more; complete requests still get their replies."""
        self._table.forget_unfinished()
        self._outbox.end_input()

    # ---- computing --------------------------------------------------------------------------------------------------

    def _answer_row(
        self, header: Header, row: memoryview, reply_cols: int, held: int, expires_s: float
    ) -> Request | None:
        """Computes a single admitted row in this thread, without putting it into the table.

        Returns:
            None if the row was computed or has failed; else its request, which was put into the table after all.
        """
        call, is_kept = header.call, False
        size = frame.payload_bytes(FrameType.REPLY, call, 1, reply_cols)
        try:
            message = memoryview(bytearray(frame.HEADER_BYTES + size))
            written = message[frame.HEADER_BYTES :]
            outcome = self._executor.compute_row(self.tenant, call, row, written)
            if outcome is True:
                reply = Header(FrameType.REPLY, header.request_id, call, 1, reply_cols, 0, size)
                message[: frame.HEADER_BYTES] = reply.pack()
                self._usage.answered(RequestClass.DECODE, call, 1, header.total_bytes, size, self._tokens)
                self._outbox.put(message)
            elif isinstance(outcome, VeilbaseError):
                self._fail(header.request_id, outcome, is_admitted=False)
            else:
                request = Request(self.tenant, header, reply_cols, RequestClass.DECODE, expires_s, self._answer)
                is_kept = self._table.keep_row(request)
                return request if is_kept else None
        finally:
            self._table.row_ended(RequestClass.DECODE, held, is_kept)
        return None

    def _compute(self, request: Request, rows: Rows) -> None:
        header, call = request.header, request.header.call
        if (
            request.area is None  # Rows on the device would wait for a large product there.
            and request.request_class is RequestClass.DECODE
            and 0 < header.rows <= INLINE_ROWS
            and header.rows * header.cols * request.reply_cols <= INLINE_PRODUCTS
        ):
            outcome = self._executor.compute_here(self.tenant, call, rows)
            if outcome is not None:
                self._answer(request, outcome)
                return
        request.complete(rows)
        if self._table.has(request):  # Otherwise the request was cancelled, or the stream has ended.
            self._executor.submit(request)

    def _answer(self, request: Request, outcome: Outcome) -> None:
        if not self._table.has(request):
            return  # The request has been cancelled meanwhile.
        if isinstance(outcome, VeilbaseError):
            self._fail(request.header.request_id, outcome)
        elif self._outbox.is_full:
            self._give_up()
        elif request.area is not None:
            self._answer_in_window(request, request.area, outcome)
        else:
            self._outbox.put_reply(request, outcome)

    def _answer_in_window(self, request: Request, area: Area, reply: torch.Tensor) -> None:
        header, window = request.header, self._window
        if window is None or not self._table.begin_reply(request):  # The tenant may read what is being written.
            return  # The stream has ended, or the request.
        try:
            window.put(area, widths.rounded(reply, header.call.reply_bits))
        except RuntimeError as exc:
            _LOGGER.error("a reply could not be written: %s", type(exc).__name__, extra=self._named(header.request_id))
            self._fail(header.request_id, FAILED)
            return
        last = frame.reply_in_window(header, request.reply_cols)
        if self._table.forget(header.request_id, then=lambda: self._outbox.append(last)):
            self._count(request)
            self._outbox.notify()

    # ---- faults and ends --------------------------------------------------------------------------------------------

    def _fail(self, request_id: int, error: VeilbaseError, is_admitted: bool = True) -> None:
        """Sends an error for a request. If `is_admitted`, this first drops the request from the table, and sends
        nothing if the table no longer has the request."""
        code = code_of(error)
        if code is WireCode.INTERNAL:  # The operator needs this line if the tenant asks about the error.
            _LOGGER.error("a request failed", extra=self._named(request_id))
        last = error_frame(request_id, error)
        if not is_admitted:
            self._outbox.append(last)
        elif not self._table.forget(
            request_id, then=lambda: self._outbox.append(last), by_tenant=code is WireCode.DEADLINE
        ):
            return
        self._usage.failed(code)
        self._log_refusal(request_id, error, code)
        if self._outbox.is_full:
            self._give_up()
        self._outbox.notify()

    def _log_refusal(self, request_id: int, error: VeilbaseError, code: WireCode) -> None:
        reason = _WHY_REQUEST.get(code)
        if isinstance(error, RegistryUnreadable):
            reason = UNREADABLE
        elif code is WireCode.UNAVAILABLE and self._is_draining:
            reason = STOPPING
        if reason is not None:
            self._refusals.add(self.tenant, reason, stream=self.stream_id, request=request_id)

    def _named(self, request_id: int) -> dict[str, object]:
        """Returns the log fields that identify a request: tenant, stream and request id."""
        return {"tenant": self.tenant, "stream": self.stream_id, "request": request_id}

    def _give_up(self) -> None:
        """Ends a stream whose tenant sends requests and does not read the replies."""
        self.end(WireCode.QUOTA)
        self._hang_up()

    def sweep(self, now: float) -> None:
        """Fails the requests whose deadline has passed. Ends the stream if the tenant was revoked or has not sent HELLO
        in time. If the stream has ended already, this only closes its connection."""
        self._sweep_at = now + SWEEP_S
        if self._table.is_closed:
            self._hang_up()  # The thread that sends still waits for the tenant to read.
            return
        for number in self._table.expired(now):
            self._fail(number, DeadlineExceeded("not answered in time"))
        try:
            code = self._refusal()
        except Unavailable:
            code = None  # The stream stays open; each request is refused on its own.
        if code is None and not self._has_greeted and now >= self._greet_by:
            code = WireCode.MALFORMED
        if code is not None:
            self.end(code)

    def drain(self) -> None:
        """Refuses new requests from now on; requests in flight are still computed."""
        self._is_draining = True

    def end(self, code: WireCode) -> None:
        """Sends the tenant an error code for the whole stream, drops all requests, and ends the stream. Replies that
        have begun count, unless the provider ends the stream for a reason of its own."""
        self._usage.failed(code)
        if code in _WHY_STREAM:
            self._refusals.add(self.tenant, _WHY_STREAM[code], stream=self.stream_id)
        self._outbox.append(Header(FrameType.ERROR, 0, code=code).pack())
        self._close(by_tenant=code not in _PROVIDERS_OWN)

    def close(self) -> None:
        """Drops all requests and ends the stream, since the tenant has left. Any thread may call this, even
        repeatedly."""
        self._close(by_tenant=True)

    def _close(self, by_tenant: bool) -> None:
        self._table.close(by_tenant)
        self._outbox.end()
        self._window = None  # Requests still refer to this session, and would keep a GPU's memory mapped.

    # ---- frames that go, and what is here ---------------------------------------------------------------------------

    def next_frame(self) -> bytes | memoryview | None:
        """Returns the frame to send next, or None if there is none at present; one thread at a time may call this.

        Large replies take turns, one chunk per turn. `notify` is called when there may be a further frame.
        """
        return self._outbox.next_frame()

    @property
    def is_over(self) -> bool:
        """Returns whether `next_frame` will never return another frame."""
        return self._outbox.is_over

    def stop_sending(self) -> None:
        """Drops replies that are partly sent, and sends nothing more. Only the thread that sends may call this."""
        self._outbox.stop_sending()

    @property
    def is_idle(self) -> bool:
        return self._table.is_idle

    def status(self) -> SessionStatus:
        """Returns counts of requests in flight and of waiting frames; any thread may call this."""
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
