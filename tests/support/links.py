"""Opens streams of raw messages to a provider, over the tensor port or gRPC, for tests that send arbitrary bytes."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Iterator
from typing import Any, Protocol

import grpc

from provider.net.ports import IpcPort
from tests.support.loopback_provider import Provider
from tests.support.waiting import WAIT_S
from wire.errors import MalformedFrame
from wire.transport.grpc_channel import STREAM_METHOD, open_channel
from wire.transport.ipc.clear_socket import ClearSocket
from wire.transport.ipc.folder import SOCKET_NAME
from wire.transport.ipc.handshake import tenant_handshake
from wire.transport.message_socket import MessageSocket
from wire.transport.tls import IPC_ALPN, client_context, handshake

BROKEN = (grpc.RpcError, OSError)
"""The errors with which reading fails if either side ended the stream without a message."""


class Link(Protocol):
    """Sends and receives arbitrary messages, over either port."""

    def send(self, message: bytes) -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> bytes: ...
    def half_close(self) -> None: ...
    def close(self) -> None: ...
    def is_active(self) -> bool: ...


class GrpcLink:
    """Carries messages over the gRPC port."""

    def __init__(self, provider: Provider, name: str) -> None:
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = open_channel(provider.url, provider.identity(name))
        method = self._channel.stream_stream(STREAM_METHOD)
        self._call = method(iter(self._outgoing.get, None), timeout=WAIT_S)

    def send(self, message: bytes) -> None:
        """Sends one message."""
        self._outgoing.put(message)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> bytes:
        message: bytes = next(self._call)
        return message

    def half_close(self) -> None:
        """Stops sending. The provider may still send messages."""
        self._outgoing.put(None)

    def is_active(self) -> bool:
        """Returns whether the stream can still be read."""
        return bool(self._call.is_active())

    def close(self) -> None:
        """Ends the stream."""
        self.half_close()
        self._call.cancel()
        self._channel.close()


class SocketLink:
    """Carries messages over the tensor port or the socket of one host."""

    def __init__(self, connection: MessageSocket) -> None:
        self.connection = connection
        self._is_active = True

    def send(self, message: bytes) -> None:
        """Sends one message."""
        with contextlib.suppress(OSError):  # as with gRPC, an end shows only when reading
            self.connection.send(message)
            give_up_at = time.monotonic() + WAIT_S
            while self.connection.has_unsent and time.monotonic() < give_up_at:
                self.connection.wait_to_send(0.1)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> bytes:
        while (message := self.connection.next_message()) is None:
            try:
                self.connection.wait()
            except EOFError:
                if (message := self.connection.next_message()) is not None:
                    break
                self._is_active = False
                raise StopIteration from None
            except OSError:
                self._is_active = False
                raise
        return bytes(message)

    def half_close(self) -> None:
        """Stops sending. The provider may still send messages."""
        self.connection.end_sending()

    def is_active(self) -> bool:
        """Returns whether the stream can still be read."""
        with contextlib.suppress(OSError, EOFError, MalformedFrame):
            self.connection.receive()
            return self._is_active
        return False

    def close(self) -> None:
        """Ends the stream."""
        self.connection.release()


def connect(provider: Provider, name: str, receive_bytes: int | None = None) -> MessageSocket:
    """Returns a connection to the tensor port, on which reading fails after a time limit."""
    identity = provider.identity(name)
    plain = socket.socket()
    if receive_bytes is not None:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    assert provider.server.tensor_port is not None
    plain.connect(("127.0.0.1", provider.server.tensor_port))
    made = handshake(plain, client_context(identity.ca_pem, identity.cert_pem, identity.key_pem), "127.0.0.1")
    plain.settimeout(WAIT_S)
    return made


def port_of(provider: Provider) -> IpcPort:
    """Returns the port of a provider that serves tenants of this host."""
    assert provider.server.ipc is not None
    return provider.server.ipc


def dial_ipc(provider: Provider) -> socket.socket:
    """Returns a plain connection to the socket of this host, on which nothing was said."""
    plain = socket.socket(socket.AF_UNIX)
    plain.settimeout(WAIT_S)
    plain.connect(str(port_of(provider).folder / SOCKET_NAME))
    return plain


def connect_ipc(provider: Provider, name: str) -> ClearSocket:
    """Returns a connection to the socket of this host, on which reading fails after WAIT_S seconds."""
    identity, plain = provider.identity(name), dial_ipc(provider)
    made = tenant_handshake(plain, client_context(identity.ca_pem, identity.cert_pem, identity.key_pem, IPC_ALPN))
    plain.settimeout(WAIT_S)
    return made


def open_link(provider: Provider, name: str) -> Link:
    """Opens a stream as a tenant does: on the socket of one host or over the tensor port if the provider has one,
    otherwise over gRPC."""
    if provider.server.ipc is not None:
        return SocketLink(connect_ipc(provider, name))
    return GrpcLink(provider, name) if provider.server.tensor_port is None else SocketLink(connect(provider, name))
