"""A stream of messages, and its implementation on grpc's public interface."""

from __future__ import annotations

import queue
from typing import Protocol

import grpc


class MessageStream(Protocol):
    """A stream of messages. `send` is safe under threads; one thread at a time calls `step`."""

    def send(self, message: bytes | memoryview) -> None:
        """Queues a message and returns. What cannot be sent yet is sent in later calls of `step` or `wait_to_send`."""
        ...

    @property
    def has_unsent(self) -> bool:
        """Tells whether a queued message still needs a `step` in order to be sent."""
        ...

    def wait_to_send(self, seconds: float) -> None:
        """Waits until more can be sent, at most for `seconds`. It is for a thread that sends while another one calls
        `step`."""
        ...

    def step(self) -> bytes | memoryview | None:
        """Waits until something happens.

        Returns:
            A message, or None where something else happened.

        Raises:
            EOFError: the peer ended the stream in order.
            VeilbaseError: the stream failed.
            grpc.RpcError: the same, from gRPC; it has `code()` and `details()`.
        """
        ...

    def is_active(self) -> bool:
        """Returns False once the end of the stream is known."""
        ...

    def close(self) -> None:
        """Ends the stream at once. It is safe to call this twice and from any thread."""
        ...


class GrpcStream:
    """A `MessageStream` on grpc's public interface."""

    def __init__(self, channel: grpc.Channel, method: str) -> None:
        """Starts the RPC."""
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        rpc = channel.stream_stream(method, request_serializer=None, response_deserializer=None)
        self._call = rpc(iter(self._outgoing.get, None), wait_for_ready=False)

    def send(self, message: bytes | memoryview) -> None:
        """Queues a message; see `MessageStream.send`."""
        self._outgoing.put(bytes(message))

    @property
    def has_unsent(self) -> bool:
        """Returns False always, since grpc has a thread that sends."""
        return False

    def wait_to_send(self, seconds: float) -> None:
        """Returns at once; see `has_unsent`."""

    def step(self) -> bytes | None:
        """Waits for a message; see `MessageStream.step`."""
        message: bytes | None = next(self._call, None)
        if message is None:
            raise EOFError
        return message

    def is_active(self) -> bool:
        """Tells whether the RPC is active; see `MessageStream.is_active`."""
        return bool(self._call.is_active())

    def close(self) -> None:
        """Cancels the RPC; see `MessageStream.close`."""
        self._outgoing.put(None)
        self._call.cancel()
