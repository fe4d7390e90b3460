"""This module keeps many requests in flight on one stream. Each request has one outcome: its reply or one error.

Guarantees: replies are matched by request id in any order, and checked against their requests before memory is
allocated for them. Every request ends by its own deadline. After a broken stream, pending requests fail with one error
and are never sent again, since that could reuse a mask: the code that owns the masks must decide that. Only a request
that the provider refused, naming a time, is sent again, later (wire/transport/retry.py), with the same payload and so
as the same bytes: a mask's slot (one row of a mask) never hides other rows. This module knows nothing of channels or
TLS.

Threads: the first thread that waits reads for all others (the leader/followers pattern), since a separate reader thread
would cost a decode step two thread switches for each call. A watchdog ends requests whose deadline has passed. A
listener reads while no request is pending, so that the end of an idle stream is noticed.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from wire import frame
from wire.errors import (
    DeadlineExceeded,
    InvalidTensor,
    LimitExceeded,
    MalformedFrame,
    QuotaExceeded,
    TransportError,
    Unavailable,
    VeilbaseError,
    VersionMismatch,
    WireCode,
    error_from_code,
)
from wire.frame import Arithmetic, Assembler, Call, Direction, FrameType, Header
from wire.limits import MAX_DEADLINE_MS, Limits, deadline_s
from wire.payload import Payload
from wire.transport.connection import MessageStream, Traffic
from wire.transport.retry import Retries
from wire.usage import StreamTokens

if TYPE_CHECKING:
    from wire.gpu_window.memory import Area
    from wire.transport.ipc.window import TenantWindow

HANDSHAKE_S = 20.0
WATCH_S = 0.5
"""The watchdog looks for passed deadlines at this interval in seconds. Deadlines are tens of seconds long."""
_LOOK_S = 0.05
_WELCOME = Call(0, Direction.FORWARD, Arithmetic.RING)
_ENDED = "the provider ended the stream; the run can go on from its last checkpoint"


class Request:
    """Holds a request that was sent and, once there is one, its outcome. It is a `Pending` of
    wire/transport/connection.py: the thread that calls `result` waits, and sends a refused request again."""

    __slots__ = (
        "_is_final", "_newest", "_owner", "area", "call", "cols", "expires_at", "held_bytes", "nudged", "outcome",
        "payload", "reply", "reply_bytes", "request_id", "rows", "sent_bytes",
    )  # fmt: skip

    def __init__(
        self, owner: Multiplexer, request_id: int, call: Call, payload: Payload | None, cols: int, held: int
    ) -> None:
        """Makes a request without an outcome.

        Args:
            owner: the multiplexer that sends the request.
            request_id: the request's number on the stream.
            call: the call that the request asks for.
            payload: the rows to send; None for the handshake, which has none.
            cols: the number of columns of the reply.
            held: how many payload bytes the request and its reply have together.
        """
        self.request_id, self.call, self.payload = request_id, call, payload
        self.rows, self.cols, self.held_bytes = 0 if payload is None else payload.num_rows, cols, held
        # the payload's bytes and the reply's, as their headers announce them
        self.sent_bytes = (
            0 if payload is None else frame.payload_bytes(FrameType.REQUEST, call, self.rows, payload.cols)
        )
        self.reply_bytes = frame.payload_bytes(FrameType.REPLY, call, self.rows, cols)
        self.expires_at = time.monotonic() + deadline_s(held)
        self.reply: Assembler | None = None
        self.outcome: torch.Tensor | VeilbaseError | None = None
        self.nudged: threading.Event | None = None
        self.area: Area | None = None
        """The request's place in the window, if its rows are there."""
        self._owner = owner
        self._newest: Request | None = None
        """The request in whose place this one was sent again last; None if this one was sent once."""
        self._is_final = False

    def settle(self, outcome: torch.Tensor | VeilbaseError) -> None:
        """Stores the outcome, unless there is one already, and wakes the thread that waits for it."""
        if self.outcome is None:
            self.outcome = outcome
            if self.nudged is not None:
                self.nudged.set()

    def result(self) -> torch.Tensor:
        """Returns the reply; see `Pending.result`. Raises the last refusal, `QuotaExceeded` or `Unavailable`, if it is
        final (see `Retries.wait`) or if the stream has broken. A further call has the same outcome, and sends
        nothing."""
        if self._is_final:
            return self.wait()
        try:
            self.outcome = reply = self._reply()
        except VeilbaseError as exc:  # and not Ctrl-C, after which the wait may go on
            self.outcome, self._is_final = copy.copy(exc), True  # without the traceback, as in `wait`
            raise
        self._is_final = True
        return reply

    def _reply(self) -> torch.Tensor:
        """Waits for the newest request that was sent for this one, and sends another one for each refusal."""
        request, retries = self._newest or self, None
        while True:
            try:
                return request.wait()
            except (QuotaExceeded, Unavailable) as exc:
                if self._owner.failure is not None or self.payload is None:
                    raise
                retries = retries or Retries()
                if not retries.wait(exc):
                    raise
            request = self._newest = self._owner.submit(self.call, self.payload, self.cols)

    def wait(self) -> torch.Tensor:
        """Waits for the outcome of this one send; returns the reply, or raises the request's error."""
        if self.outcome is None:
            self._owner.wait_for(self)
        if isinstance(self.outcome, torch.Tensor):
            return self.outcome
        if self.outcome is None:
            raise Unavailable("the connection was closed")
        raise copy.copy(self.outcome)  # The stream keeps its failure; a traceback on it would keep the caller's rows.


class Multiplexer:
    """Sends requests and receives replies at the tenant's end of one stream."""

    def __init__(
        self,
        stream: MessageStream,
        limits: Limits,
        traffic: Traffic,
        window: TenantWindow | None = None,
    ) -> None:
        """Sends HELLO and starts the watchdog and the listener.

        Args:
            stream: a stream that was just opened and that nothing else uses.
            limits: the limits in the manifest.
            traffic: counts what crosses.
            window: memory that both ends share, for large requests; None if there is none.
        """
        self._window = window
        self._stream, self._limits, self._traffic, self._tokens = stream, limits, traffic, StreamTokens()
        self._requests: dict[int, Request] = {}
        # The lock is reentrant: a signal handler may call `close` in a thread that already holds the lock.
        self._lock = threading.RLock()
        self._state, self._num_waiting_for_room = threading.Condition(self._lock), 0
        self._reading = threading.Lock()
        self._waiting: dict[int, Request] = {}
        self._leader: Request | None = None
        self._makes_room = False
        self._held_bytes = 0
        self._ids = itertools.count(1)
        self.failure: VeilbaseError | None = None
        self._ended, self._is_idle = threading.Event(), threading.Event()
        # The handshake has a deadline of its own; a transport has none for a stream that is meant to live long.
        self._welcome = Request(self, 0, _WELCOME, None, 0, 0)
        self._welcome.expires_at = time.monotonic() + HANDSHAKE_S
        self._requests[0] = self._welcome
        self._stream.send(frame.hello(FrameType.HELLO))
        for name, work in (("veilbase-watchdog", self._watch), ("veilbase-listener", self._listen)):
            threading.Thread(target=work, name=name, daemon=True).start()

    def wait_welcome(self) -> None:
        """Waits until the provider has sent WELCOME, which ends the handshake. Raises the error that ended the stream
        if no WELCOME came."""
        self._welcome.wait()

    def is_usable(self) -> bool:
        """Tells whether the stream still takes requests; returns False also if it ended while no thread was reading."""
        if self.failure is None and not self._stream.is_active():
            self.fail(Unavailable(_ENDED))
        return self.failure is None

    # ---- waiting and reading ----------------------------------------------------------------------------------------

    def wait_for(self, request: Request) -> None:
        """Waits until the request has an outcome; reads for all threads if no other thread is reading."""
        if self._reading.acquire(blocking=False):
            self._lead(request)
            return
        # The event is set up before `outcome` is read, so that `settle` finds the event.
        nudged = request.nudged = threading.Event()
        # The request is listed before this thread tries to lead again: a leader that stops wakes the listed threads.
        self._waiting[request.request_id] = request
        try:
            while request.outcome is None:
                if self._reading.acquire(blocking=False):
                    self._lead(request)
                else:
                    nudged.wait()
                    nudged.clear()
        finally:
            self._waiting.pop(request.request_id, None)

    def _lead(self, request: Request) -> None:
        self._leader = request
        try:
            while request.outcome is None:
                self._read_one()
        finally:
            self._stop_leading(request)

    def _stop_leading(self, request: Request | None) -> None:
        self._leader = None
        self._reading.release()
        for other in list(self._waiting.values()):
            if other is not request and other.nudged is not None:
                other.nudged.set()  # All are woken: a thread whose reply has just come would not lead.

    def _read_one(self) -> None:
        try:
            message = self._stream.step()
            if message is not None:
                self._traffic.add(down=len(message))
                self._take(*frame.parse(message))
        except EOFError:
            self.fail(Unavailable(_ENDED))
        except VeilbaseError as exc:
            self.fail(exc.with_traceback(None))  # The failure is kept, and a traceback would keep this object and rows.
        except (KeyboardInterrupt, SystemExit):
            self.fail(Unavailable("the reading thread was interrupted"))
            raise
        except Exception as exc:  # noqa: BLE001 - the other threads that wait must not be left waiting
            self.fail(TransportError(f"reading replies failed: {type(exc).__name__}"))

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_S):
            now = time.monotonic()
            waiting = list(self._requests.values())
            for request in [one for one in waiting if now >= one.expires_at]:
                self._expire(request)
            if not waiting:
                self._is_idle.set()
        self._is_idle.set()

    def _listen(self) -> None:
        """Reads while no request is pending. When the stream has ended, this reads its remaining messages, so that the
        stream can be freed."""
        while not self._ended.is_set():
            self._is_idle.wait()
            self._is_idle.clear()
            if not self._requests and not self._ended.is_set() and self._reading.acquire(blocking=False):
                try:
                    self._read_one()
                finally:
                    self._stop_leading(None)
        with self._reading:
            self._drain()

    def _drain(self) -> None:
        try:
            while True:
                self._stream.step()
        except Exception:  # noqa: BLE001, S110 - the stream ends here, in whatever form it does
            pass

    def _expire(self, request: Request) -> None:
        if self._forget(request.request_id) is None:
            return
        window = self._window
        if window is not None and request.area is not None:
            window.lose(request.area)
        if request.request_id == 0:
            error = Unavailable(f"the provider did not answer the handshake within {HANDSHAKE_S:.0f} s")
            request.settle(error)
            self.fail(error)
        else:
            request.settle(DeadlineExceeded(f"no complete answer to request {request.request_id} within its deadline"))
            self._stream.send(Header(FrameType.CANCEL, request.request_id).pack())
        # `_leader` is read after `settle`, so that a thread that begins to lead now sees the outcome. The reader thread
        # is inside the stream's `step`, which has no timeout: only the end of the stream frees that thread.
        if self._leader is request or self._makes_room:
            self._stream.close()

    # ---- sending ----------------------------------------------------------------------------------------------------

    def submit(self, call: Call, payload: Payload, reply_cols: int) -> Request:
        """Sends one request and returns it when its last chunk has been sent, or earlier if it has an outcome or the
        stream has failed. Waits first while too many bytes are in flight.

        Args:
            payload, reply_cols: see `Connection.submit`.

        Raises:
            LimitExceeded: the request and its reply are larger than the limit on bytes in flight.
            DeadlineExceeded: earlier requests were not answered in time, so that there is no room.
            VeilbaseError: the error that ended the stream.
        """
        request = self._admit(call, payload, reply_cols)
        size = request.sent_bytes
        deadline_ms = min(MAX_DEADLINE_MS, int(1000 * deadline_s(request.held_bytes)))
        header = Header(FrameType.REQUEST, request.request_id, call, request.rows, payload.cols, 0, size, deadline_ms)
        sent = 0
        for message in self._in_window(request, header, payload) or payload.frames(header):
            self._stream.send(message)
            sent += len(message)
        if request.area is not None:
            sent += size
        self._traffic.add(up=sent, calls=1)
        while self._stream.has_unsent and request.outcome is None and self.failure is None:
            self._make_room()
        return request

    def _in_window(self, request: Request, header: Header, payload: Payload) -> Iterable[bytes]:
        """Copies a request's rows into the window, if there is one and they may go there, and returns the frame that
        says so; returns no frame otherwise."""
        window = self._window
        if window is None:
            return ()
        area = request.area = window.take(header.call, payload, request.cols)
        if area is None:
            return ()
        return (replace(header, code=frame.IN_WINDOW).pack() + area.pack(),)

    def _admit(self, call: Call, payload: Payload, reply_cols: int) -> Request:
        held = frame.held_bytes(call, payload.num_rows, payload.cols, reply_cols)
        if held > self._limits.max_in_flight_bytes:
            raise LimitExceeded(f"a request of {held} bytes is above {self._limits.max_in_flight_bytes} in flight")
        give_up_at = 0.0
        while True:
            with self._lock:
                if self.failure is not None:
                    raise copy.copy(self.failure)
                if self._held_bytes + held <= self._limits.max_in_flight_bytes:
                    request = Request(self, next(self._ids), call, payload, reply_cols, held)
                    self._requests[request.request_id] = request
                    self._held_bytes += held
                    return request
            now = time.monotonic()
            give_up_at = give_up_at or now + deadline_s(self._limits.max_in_flight_bytes)
            if now >= give_up_at:
                raise DeadlineExceeded("earlier requests of this stream were not answered in time")
            self._make_room()

    def _make_room(self) -> None:
        """Reads once, or waits a moment for the thread that reads. A thread that sends must also read, since replies
        make room for more requests."""
        if self._reading.acquire(blocking=False):
            self._makes_room = True
            try:
                # If the last request has just ended, there is nothing to read and no deadline that would end the read.
                if self._requests:
                    self._read_one()
            finally:
                self._makes_room = False
                self._stop_leading(None)
        # The reading thread began to wait before there were unsent bytes, so it waits only for replies.
        elif self._stream.has_unsent:
            self._stream.wait_to_send(_LOOK_S)
        else:
            with self._lock:
                self._num_waiting_for_room += 1
                self._state.wait(_LOOK_S)
                self._num_waiting_for_room -= 1

    # ---- receiving --------------------------------------------------------------------------------------------------

    def _forget(self, request_id: int) -> Request | None:
        with self._lock:
            request = self._requests.pop(request_id, None)
            if request is not None:
                self._held_bytes -= request.held_bytes
                if self._num_waiting_for_room:
                    self._state.notify_all()
        return request

    def _take(self, header: Header, payload: memoryview) -> None:
        if header.kind is FrameType.REPLY:
            self._take_reply(header, payload)
        elif header.kind is FrameType.ERROR:
            self._take_error(header)
        elif header.kind is FrameType.WELCOME:
            if bytes(payload) != frame.MAGIC or header.code != frame.PROTOCOL_VERSION:
                raise VersionMismatch(f"this tenant speaks protocol {frame.PROTOCOL_VERSION}, not {header.code}")
            self._forget(0)
            self._welcome.settle(torch.empty(0, device="cpu"))
        else:
            raise MalformedFrame("the provider sent a frame that only tenants send")

    def _take_error(self, header: Header) -> None:
        error = error_from_code(header.code, header.request_id, header.deadline_ms)
        if header.request_id == 0:  # The error is about the stream, not about one request.
            raise error
        request = self._forget(header.request_id)
        if request is None:
            return
        window = self._window
        if window is not None and request.area is not None:
            # After a passed deadline the provider may still write the reply, so the area is not used again.
            (window.lose if header.code == WireCode.DEADLINE else window.give_back)(request.area)
        request.settle(error)

    def _take_reply(self, header: Header, payload: memoryview) -> None:
        request = self._requests.get(header.request_id)
        if request is None:
            return  # The request was cancelled meanwhile.
        if request.reply is None:
            expected = (request.call, request.rows, request.cols, request.reply_bytes)
            if (header.call, header.rows, header.cols, header.total_bytes) != expected:
                raise MalformedFrame("a reply does not have the shape of its request")
            if (header.code == frame.IN_WINDOW) != (request.area is not None):
                raise MalformedFrame("a reply is not where its request was")
            if request.area is not None:
                if header.offset or len(payload):
                    raise MalformedFrame("a reply in the window came with a payload")
                self._take_from_window(request, request.area)
                return
            request.reply = Assembler(header)
        if not request.reply.add(header, payload):
            return
        try:
            reply = request.reply.tensor()
        except InvalidTensor:
            raise MalformedFrame("a reply's rows do not end with zeros") from None
        request.reply = None  # Its packed bytes are not needed any more.
        if self._forget(header.request_id) is not None:
            self._count(request)
            request.settle(reply)

    def _count(self, request: Request) -> None:
        """Counts a request whose reply is complete. Callers must do so before they settle it, so that who waits for the
        reply finds it counted."""
        if request.payload is not None:
            self._traffic.answered(request.call, request.rows, request.sent_bytes, request.reply_bytes, self._tokens)

    def _take_from_window(self, request: Request, area: Area) -> None:
        window = self._window
        if window is None or self._forget(request.request_id) is None:
            return
        self._traffic.add(down=request.rows * request.cols * frame.ITEM_BYTES)
        self._count(request)
        try:
            request.settle(window.reply(area, request.rows, request.cols))
        except TransportError as exc:
            request.settle(exc)
        except BaseException:  # The request is no longer pending, so nobody else would end its thread's wait.
            request.settle(Unavailable("the reading thread was interrupted"))
            raise
        window.give_back(area)

    def fail(self, error: VeilbaseError) -> None:
        """Ends the stream; every pending request fails with `error`."""
        with self._lock:
            if self.failure is None:
                self.failure = error
            pending = list(self._requests.values())
            self._requests.clear()
            self._held_bytes = 0
            self._state.notify_all()
        self._window = None  # A GPU's memory is not kept until this object is collected.
        self._ended.set()
        self._is_idle.set()
        self._stream.close()
        for request in pending:
            request.settle(error)

    def close(self) -> None:
        """Ends the stream; every pending request fails with `Unavailable`."""
        self.fail(Unavailable("the connection was closed"))
