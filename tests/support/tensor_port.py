"""Holds helpers for tests of the tensor port: they open connections, and check that nothing remains of them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.support import sockets
from tests.support.loopback_provider import Provider
from tests.support.stream_sessions import service_of, tensors_of
from tests.support.waiting import until
from wire import frame
from wire.frame import Header
from wire.manifest import parse_manifest
from wire.transport import grpc_connection
from wire.transport.message_socket import MessageSocket


def dial(provider: Provider) -> socket.socket:
    """Returns a plain TCP connection to the tensor port."""
    assert provider.server.tensor_port is not None
    return sockets.dial(provider.server.tensor_port)


def stream_threads() -> set[int | None]:
    """Returns this process's threads that serve streams of the tensor port."""
    return {one.ident for one in threading.enumerate() if one.name == "veilbase-stream"}


def assert_nothing_left(provider: Provider) -> None:
    """Waits until all sessions, connections and reserved places of a provider are gone."""
    service = service_of(provider)
    until(lambda: not service.sessions, "the end of the sessions")
    until(lambda: not service.status().calls, "their places are free")
    until(lambda: not tensors_of(provider).status().num_connections, "the end of the connections")
    assert not tensors_of(provider).status().num_guests


def carrier_of(provider: Provider) -> str:
    """Returns the text that a tenant's connection shows if this provider's tensor port carries the stream."""
    return f"tensor port {provider.server.tensor_port}"


@contextlib.contextmanager
def announcing(monkeypatch: pytest.MonkeyPatch, port: int | None) -> Iterator[None]:
    """Inside the context, makes every manifest that a tenant fetches name this tensor port."""
    with monkeypatch.context() as patch:
        other = {"tensor_port": port}
        patch.setattr(grpc_connection, "parse_manifest", lambda data: parse_manifest(data).model_copy(update=other))
        yield


def say(connection: MessageSocket, *messages: bytes) -> None:
    """Sends as many messages as the connection accepts."""
    with contextlib.suppress(OSError):
        for message in messages:
            connection.send(message)


def hear(connection: MessageSocket) -> Header:
    """Waits for the next frame and returns its header."""
    while (message := connection.next_message()) is None:
        try:
            connection.wait()
        except EOFError:
            if (message := connection.next_message()) is None:
                raise
            break
    return frame.parse(message)[0]
