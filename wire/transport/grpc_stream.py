"""A stream of messages, and the one that grpc's public interface gives."""

from __future__ import annotations

import queue
from typing import Protocol

import grpc


class MessageStream(Protocol):
    """A stream of messages; `send` is safe under threads, `step` is called by one thread at a time."""

    def send(self, message: bytes | memoryview) -> None:
        """Queues a message and returns; what cannot leave yet leaves in later steps, or in `wait_to_send`."""
        ...

    @property
    def has_unsent(self) -> bool:
        """Whether a queued message needs a `step` to leave."""
        ...

    def wait_to_send(self, seconds: float) -> None:
        """Waits until more can leave, at most so long; for who sends while another steps."""
        ...

    def step(self) -> bytes | memoryview | None:
        """Waits until something happens.

        Returns:
            A message, or None where something else happened.

        Raises:
            EOFError: the peer ended the stream in order.
            VeilbaseError: the stream failed.
            grpc.RpcError: the same, where it is gRPC's; has `code()` and `details()`.
        """
        ...

    def is_active(self) -> bool:
        """False once the end of the stream is known."""
        ...

    def close(self) -> None:
        """Ends the stream at once; safe to call twice and from any thread."""
        ...


class GrpcStream:
    """On grpc's public interface."""

    def __init__(self, channel: grpc.Channel, method: str) -> None:
        """Starts the RPC."""
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        rpc = channel.stream_stream(method, request_serializer=None, response_deserializer=None)
        self._call = rpc(iter(self._outgoing.get, None), wait_for_ready=False)

    def send(self, message: bytes | memoryview) -> None:
        """See `MessageStream.send`."""
        self._outgoing.put(bytes(message))

    @property
    def has_unsent(self) -> bool:
        """Never: grpc has a thread for it."""
        return False

    def wait_to_send(self, seconds: float) -> None:
        """See `has_unsent`."""

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
