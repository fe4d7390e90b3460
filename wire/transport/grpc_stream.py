"""This module defines a stream of messages and implements it on grpc's public interface."""

from __future__ import annotations

import queue
from typing import Protocol

import grpc


class MessageStream(Protocol):
    """Carries messages in both directions. `send` is safe under threads; only one thread at a time may call `step`."""

    def send(self, message: bytes | memoryview) -> None:
        """Queues a message and returns. Bytes that cannot be sent yet are sent in later calls of `step` or
        `wait_to_send`."""
        ...

    @property
    def has_unsent(self) -> bool:
        """Tells whether a queued message still needs a `step` in order to be sent."""
        ...

    def wait_to_send(self, seconds: float) -> None:
        """Waits at most `seconds` until more bytes can be sent. This method is for a thread that sends while another
        thread calls `step`."""
        ...

    def step(self) -> bytes | memoryview | None:
        """Waits for a message, or for another event such as room to send.

        Returns:
            A message, or None after another event.

        Raises:
            EOFError: the peer ended the stream properly.
            VeilbaseError: the stream failed.
            grpc.RpcError: the stream failed, as gRPC reports it; this error has `code()` and `details()`.
        """
        ...

    def is_active(self) -> bool:
        """Tells whether the stream is active; returns False once its end is known."""
        ...

    def close(self) -> None:
        """Ends the stream at once. Any thread may call this, more than once."""
        ...


class GrpcStream:
    """Implements `MessageStream` on grpc's public interface."""

    def __init__(self, channel: grpc.Channel, method: str) -> None:
        """Starts the RPC `method` on the channel."""
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        rpc = channel.stream_stream(method, request_serializer=None, response_deserializer=None)
        self._call = rpc(iter(self._outgoing.get, None), wait_for_ready=False)

    def send(self, message: bytes | memoryview) -> None:
        """Queues a message to be sent; see `MessageStream.send`."""
        self._outgoing.put(bytes(message))

    @property
    def has_unsent(self) -> bool:
        """Returns False always, since grpc sends in a thread of its own."""
        return False

    def wait_to_send(self, seconds: float) -> None:
        """Returns at once, since grpc sends in a thread of its own."""

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
        """Cancels the RPC, which ends the stream; see `MessageStream.close`."""
        self._outgoing.put(None)
        self._call.cancel()
