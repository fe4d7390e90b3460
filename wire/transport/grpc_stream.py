"""One bidirectional gRPC stream of raw messages, driven by whoever waits for it.

grpc's public stream costs two threads of its own a call: one that takes messages from an iterator, one that waits for
events and wakes the caller. `DirectStream` starts operations and waits for events in the caller's thread, as grpc's own
single-threaded unary streams do; on two cores it took 80 to 120 µs off a round trip (docs/benchmarks.md). It stands on
names that grpc does not promise to keep, so `open_stream` falls back to `PlainStream`, which uses nothing private.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import Any, Protocol

import grpc

try:
    from grpc._cython import cygrpc
except ImportError:  # pragma: no cover - a grpc that is built in another way
    cygrpc = None

_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


class MessageStream(Protocol):
    """A stream of messages; `send` is safe under threads, `step` is called by one thread at a time."""

    def send(self, message: bytes) -> None:
        """Queues a message and returns; what cannot leave yet leaves in later steps."""
        ...

    @property
    def has_unsent(self) -> bool:
        """Whether a queued message needs a `step` to leave."""
        ...

    def step(self) -> bytes | None:
        """Waits until something happens.

        Returns:
            A message, or None where something else happened.

        Raises:
            EOFError: the peer ended the stream in order.
            grpc.RpcError: the stream failed; has `code()` and `details()`.
        """
        ...

    def is_active(self) -> bool:
        """False once the end of the stream is known."""
        ...

    def close(self) -> None:
        """Ends the stream at once; safe to call twice and from any thread."""
        ...


def open_stream(channel: grpc.Channel, method: str) -> MessageStream:
    """Starts a stream on a channel."""
    try:
        return DirectStream(channel, method)
    except (AttributeError, TypeError):  # grpc has changed inside
        return PlainStream(channel, method)


class PlainStream:
    """On grpc's public interface."""

    def __init__(self, channel: grpc.Channel, method: str) -> None:
        """Starts the RPC."""
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        rpc = channel.stream_stream(method, request_serializer=None, response_deserializer=None)
        self._call = rpc(iter(self._outgoing.get, None), wait_for_ready=False)

    def send(self, message: bytes) -> None:
        """See `MessageStream.send`."""
        self._outgoing.put(message)

    @property
    def has_unsent(self) -> bool:
        """Never: grpc has a thread for it."""
        return False

    def step(self) -> bytes | None:
        """See `MessageStream.step`."""
        message: bytes | None = next(self._call, None)
        if message is None:
            raise EOFError
        return message

    def is_active(self) -> bool:
        """See `MessageStream.is_active`."""
        return bool(self._call.is_active())

    def close(self) -> None:
        """See `MessageStream.close`."""
        self._outgoing.put(None)
        self._call.cancel()


class StreamFailed(grpc.RpcError):  # type: ignore[misc]
    """The status with which a `DirectStream` ended."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        """Args: details: the peer's text; for this side's use only."""
        super().__init__()
        self._code, self._details = code, details

    def code(self) -> grpc.StatusCode:
        """As of a public call."""
        return self._code

    def details(self) -> str:
        """As of a public call."""
        return self._details


class DirectStream:
    """On one completion queue, which belongs to the caller's threads alone."""

    def __init__(self, channel: grpc.Channel, method: str) -> None:
        """Starts the RPC.

        Raises:
            AttributeError, TypeError: this grpc has other internals.
        """
        opening = (
            ((cygrpc.SendInitialMetadataOperation((), 0),), "opened"),
            ((cygrpc.ReceiveInitialMetadataOperation(0),), "greeted"),
            ((cygrpc.ReceiveStatusOnClientOperation(0),), "status"),
        )
        self._call: Any = channel._channel.segregated_call(0, method.encode(), None, None, (), None, opening, None)
        self._lock = threading.Lock()
        self._unsent: deque[bytes] = deque()
        self._sending = self._receiving = self._closed = self._input_over = False
        self._pending = len(opening)
        self._status: tuple[grpc.StatusCode, str] | None = None

    def _start(self, operation: Any, tag: str) -> bool:
        if self._status is not None or not self._call.operate((operation,), tag):
            return False
        self._pending += 1
        return True

    def send(self, message: bytes) -> None:
        """See `MessageStream.send`; grpc takes one message at a time."""
        with self._lock:
            if self._sending:
                self._unsent.append(message)
            else:
                self._sending = self._start(cygrpc.SendMessageOperation(message, 0), "sent")

    @property
    def has_unsent(self) -> bool:
        """See `MessageStream.has_unsent`."""
        return bool(self._unsent)

    def step(self) -> bytes | None:
        """See `MessageStream.step`."""
        with self._lock:
            if not self._receiving and not self._input_over:
                self._receiving = self._start(cygrpc.ReceiveMessageOperation(0), "received")
            if self._pending == 0:
                self._raise_status()
        event = self._call.next_event()
        with self._lock:
            self._pending -= 1
            if event.tag == "received":
                self._receiving = False
                message: bytes | None = event.batch_operations[0].message()
                self._input_over = message is None  # its status comes next
                return message
            if event.tag == "sent":
                self._sending = bool(self._unsent) and self._start(
                    cygrpc.SendMessageOperation(self._unsent.popleft(), 0), "sent"
                )
            elif event.tag == "status":
                self._keep_status(event.batch_operations[0])
        return None

    def _keep_status(self, operation: Any) -> None:
        details = operation.details()
        self._unsent.clear()
        self._status = (
            _STATUS_CODES.get(operation.code(), grpc.StatusCode.UNKNOWN),
            details.decode("utf-8", "replace") if isinstance(details, bytes) else str(details),
        )

    def _raise_status(self) -> None:
        code, details = self._status or (grpc.StatusCode.UNKNOWN, "")
        if code is grpc.StatusCode.OK:
            raise EOFError
        raise StreamFailed(code, details)

    def is_active(self) -> bool:
        """See `MessageStream.is_active`."""
        return self._status is None and not self._closed

    def close(self) -> None:
        """See `MessageStream.close`."""
        with self._lock:
            if self._closed or self._status is not None:
                return
            self._closed = True
        self._call.cancel(grpc.StatusCode.CANCELLED.value[0], "closed by the tenant")
