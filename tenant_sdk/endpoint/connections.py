"""This module limits how many connections there are, how long one may stay idle, and how long a client may leave a
response unread.

Guarantees: a connection over the limit gets one fixed response and is closed. A connection is also closed if it has no
request for `idle_s` seconds, or if its client leaves a response unread for `stall_s` seconds. Its requests are then
cancelled, so that others can run. With TLS, a handshake takes `handshake_s` seconds at most, and if there are as many
unfinished handshakes as connections are allowed, a new one ends the oldest. At most `MOST_ENDING` connections
beyond the limit may be in the middle of closing, so that clients that delay the close cannot use up file descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from tenant_sdk.endpoint.errors import HttpError, to_bytes
from tenant_sdk.endpoint.settings import EndpointLimits

_FULL_RETRY_S = 1.0
MOST_ENDING = 32
"""Limits two counts of TLS connections that are closing: those over the connection limit, which still get a response,
and those whose handshake was ended, which the event loop has not closed yet."""


class ListeningSocket(socket.socket):
    """Accepts connections, and shuts the oldest one whose handshake is not complete when too many of them wait."""

    def __init__(self, family: int, kind: int, protocol: int, limits: EndpointLimits, has_tls: bool) -> None:
        """Makes a socket that is not bound yet.

        Args:
            family, kind, protocol: as for `socket.socket`.
            limits: the limits for clients.
            has_tls: whether connections begin with a handshake.
        """
        super().__init__(family, kind, protocol)
        self.limits = limits
        self.has_tls = has_tls
        self._handshakes: dict[int, socket.socket] = {}
        self._shut: list[socket.socket] = []

    def accept(self) -> tuple[socket.socket, Any]:
        """Returns the next connection and its client's address.

        Raises:
            BlockingIOError: no connection waits, or the event loop must first close `MOST_ENDING` connections that
                were shut here. The event loop then calls this method again.
        """
        self._shut = [one for one in self._shut if one.fileno() >= 0]
        if len(self._shut) >= MOST_ENDING:
            raise BlockingIOError
        connection, address = super().accept()
        if self.has_tls:
            self._handshakes = {number: one for number, one in self._handshakes.items() if one.fileno() == number}
            if len(self._handshakes) >= self.limits.connections:
                oldest = self._handshakes.pop(next(iter(self._handshakes)))
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its transport notices, and closes it
                self._shut.append(oldest)
            self._handshakes[connection.fileno()] = connection
        return connection, address

    def complete(self, descriptor: int) -> None:
        """Notes that the handshake of the connection with this file descriptor is complete."""
        self._handshakes.pop(descriptor, None)


class EventLoop(asyncio.SelectorEventLoop):
    """Gives clients less time for a TLS handshake than asyncio's 60 seconds, for which uvicorn has no setting."""

    async def create_server(self, *args: Any, **options: Any) -> asyncio.Server:
        """Returns a server, which gets the handshake limit of its `ListeningSocket` if it uses TLS."""
        listening = options.get("sock")
        if isinstance(listening, ListeningSocket) and options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = listening.limits.handshake_s
        return await super().create_server(*args, **options)


def protocol_class(listening: ListeningSocket) -> type[asyncio.Protocol]:
    """Returns a subclass of uvicorn's HTTP/1.1 protocol that applies a socket's limits to its connections."""
    limits = listening.limits

    class LimitedProtocol(H11Protocol):
        """Serves one connection."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._idle: asyncio.TimerHandle | None = None
            self._stalled: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            listening.complete(transport.get_extra_info("socket").fileno())
            # Without TLS a connection ends at once, whatever its client does, so each gets the response.
            if listening.has_tls and len(self.connections) > limits.connections + MOST_ENDING:
                transport.abort()
            elif len(self.connections) > limits.connections:
                transport.write(_FULL)
                transport.close()
            else:
                self._idle = self.loop.call_later(limits.idle_s, transport.abort)

        def handle_events(self) -> None:
            cycle = self.cycle
            super().handle_events()
            if self.cycle is not cycle:  # a whole head has arrived: from now on the request has limits of its own
                self._end_timers()

        def on_response_complete(self) -> None:
            # uvicorn starts its own timer for the next request now, and stops it when any byte of it arrives.
            super().on_response_complete()
            if not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete):
                self._end_timers()
                self._idle = self.loop.call_later(limits.idle_s, self.transport.abort)

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._stalled is None:
                self._stalled = self.loop.call_later(limits.stall_s, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._stalled is not None:
                self._stalled.cancel()
                self._stalled = None

        def send_400_response(self, msg: str) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self.transport.abort()  # an answer is under way, in which nothing else may stand
                return
            self.transport.write(_MALFORMED)  # uvicorn's own answer is no JSON
            self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_timers()
            if self._stalled is not None:
                self._stalled.cancel()
            super().connection_lost(exc)

        def _end_timers(self) -> None:
            if self._idle is not None:
                self._idle.cancel()
                self._idle = None

    return LimitedProtocol


def _whole_response(line: bytes, error: HttpError) -> bytes:
    body = to_bytes(error.body())
    headers = [
        (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), (b"connection", b"close"),
        *error.headers(),
    ]  # fmt: skip
    head = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    return b"HTTP/1.1 " + line + b"\r\n" + head + b"\r\n" + body


_FULL = _whole_response(
    b"429 Too Many Requests",
    HttpError(429, "too many connections are open: try again later", "too_many_connections", retry_s=_FULL_RETRY_S),
)
_MALFORMED = _whole_response(b"400 Bad Request", HttpError(400, "expected HTTP/1.1", "invalid_http"))
