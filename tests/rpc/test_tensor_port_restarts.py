"""Tests the tensor port if a provider stops, starts again, moves to another port or has no tensor port, and tests its
settings."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from provider.cli import main
from provider.config import ProviderSettings
from provider.identity.authority import StateDir
from provider.model.served_model import ServedModel
from provider.net.ports import TensorPort
from provider.net.server import Server
from provider.net.session import Session
from tests.support.providers import Provider, SwitchedModel, service_of, tensors_of
from tests.support.raw_peers import RawStream, carrier_of, dial_tensor_port
from tests.support.ring_products import CALL, REPLY_COLS, ask, assert_served, ring_rows
from tests.support.waiting import WAIT_S, until
from wire import frame
from wire.errors import ConfigurationError, Unavailable, WireCode
from wire.frame import FrameType
from wire.manifest import parse_manifest
from wire.payload import RowsPayload
from wire.transport import grpc_connection

# ---- stops and restarts ---------------------------------------------------------------------------------------------


def test_a_stop_tells_open_streams(provider: Provider) -> None:
    streams = [RawStream(provider, f"tenant{number}") for number in range(3)]
    provider.server.stop()
    for stream in streams:
        stream.expect_error(0, WireCode.UNAVAILABLE)
        stream.expect_end()
        stream.close()
    with pytest.raises(OSError):
        dial_tensor_port(provider)


def test_a_drain_answers_what_is_in_flight_and_refuses_the_rest(
    start: Callable[..., Provider], tiny_served_model: ServedModel
) -> None:
    switched = SwitchedModel(tiny_served_model)
    provider = start(switched)
    stream = RawStream(provider)
    begun, release = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> torch.Tensor:
        begun.set()
        release.wait(WAIT_S)
        return tiny_served_model.compute(*arguments)

    switched.make = slow
    stream.send(*stream.request(1, ring_rows(50)))
    assert begun.wait(WAIT_S)
    stopping = threading.Thread(target=provider.server.stop, args=(WAIT_S,))
    stopping.start()
    until(lambda: service_of(provider).status().is_draining, "the drain")
    until(lambda: all(one.status().is_draining for one in service_of(provider).sessions), "every stream knows")
    stream.send(*stream.request(2, ring_rows(50)))
    assert stream.receive().request_id == 2
    late = RawStream(provider, "late", greet=False)
    late.expect_error(0, WireCode.UNAVAILABLE)
    release.set()
    reply = stream.receive()
    assert (reply.kind, reply.request_id) == (FrameType.REPLY, 1)
    stream.expect_error(0, WireCode.UNAVAILABLE)
    stopping.join(WAIT_S)
    for one in (stream, late):
        one.close()


def test_grpc_carries_the_stream_where_the_port_is_closed(provider: Provider) -> None:
    tensors_of(provider).stop()
    connection = provider.connect()
    assert connection.manifest().tensor_port == provider.server.tensor_port
    for _ in range(2):
        assert_served(connection, provider.served_model)
    assert connection.carrier == "gRPC"


@contextlib.contextmanager
def announcing(monkeypatch: pytest.MonkeyPatch, port: int | None) -> Iterator[None]:
    """Inside the context, makes every manifest that a tenant fetches name this tensor port."""
    with monkeypatch.context() as patch:
        other = {"tensor_port": port}
        patch.setattr(grpc_connection, "parse_manifest", lambda data: parse_manifest(data).model_copy(update=other))
        yield


def test_grpc_carries_the_stream_where_something_else_answers(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = provider.connect()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            plain, _ = listener.accept()
            plain.sendall(b"220 mail.example ESMTP\r\n")
            plain.close()

        thread = threading.Thread(target=answer)
        thread.start()
        with announcing(monkeypatch, listener.getsockname()[1]):
            connection.manifest()
        assert_served(connection, provider.served_model)
        thread.join(WAIT_S)
    assert connection.carrier == "gRPC"


def restarted(old: Provider, state: StateDir, served_model: ServedModel) -> Server:
    """Starts another provider at the same URL, with another tensor port."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = other.getsockname()[1]
    server = Server("127.0.0.1", old.server.port, state, tensor_port=free)
    server.start(served_model)
    return server


def test_after_a_restart_the_new_port_is_used_and_nothing_is_sent_twice(
    start: Callable[..., Provider], tiny_served_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    switched = SwitchedModel(tiny_served_model)
    provider = start(switched)
    asked: list[bytes] = []
    receive = Session.receive

    def note(session: Session, message: bytes) -> bool:
        if message[0] == FrameType.REQUEST:
            asked.append(bytes(message[frame.HEADER_BYTES :]))
        return receive(session, message)

    monkeypatch.setattr(Session, "receive", note)
    connection = provider.connect()
    assert_served(connection, provider.served_model)
    begun, release = threading.Event(), threading.Event()

    def slow(*_: Any) -> torch.Tensor:
        begun.set()
        release.wait(WAIT_S)
        return torch.zeros(50, REPLY_COLS, dtype=torch.int32)

    switched.make = slow
    pending = connection.submit(CALL, RowsPayload(ring_rows(50)), REPLY_COLS)
    assert begun.wait(WAIT_S)
    stopping = threading.Thread(target=provider.server.stop)
    stopping.start()
    with pytest.raises(Unavailable):
        pending.result()
    release.set()
    stopping.join(WAIT_S)
    server = restarted(provider, provider.state, tiny_served_model)
    try:
        assert server.tensor_port != provider.server.tensor_port
        assert_served(connection, tiny_served_model)
        assert connection.carrier == f"tensor port {server.tensor_port}"
    finally:
        connection.close()
        server.stop()
    assert len(asked) == len(set(asked)) == 3


def test_a_port_that_is_another_providers_by_now_gets_no_rows(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another provider of the same operator, with the same CA, may listen at a port that the first has released. A
    tenant of the first must send it no rows."""
    connection = provider.connect()
    other = Server("127.0.0.1", 0, provider.state)
    service = other.start(provider.served_model)
    seen: list[int] = []
    receive = Session.receive

    def note(session: Session, message: bytes) -> bool:
        if session in service.sessions:
            seen.append(message[0])
        return receive(session, message)

    monkeypatch.setattr(Session, "receive", note)
    try:
        with announcing(monkeypatch, other.tensor_port):
            connection.manifest()
        with pytest.raises(Unavailable, match="nothing was sent"):
            ask(connection, ring_rows(1))
        assert set(seen) == {FrameType.HELLO}
        assert_served(connection, provider.served_model)  # after asking again, it finds its own port
        assert connection.carrier == carrier_of(provider)
    finally:
        other.stop()


def test_without_a_tensor_port_the_manifest_names_none(
    start: Callable[..., Provider], tiny_served_model: ServedModel
) -> None:
    connection = start(tiny_served_model, tensor_port=None).connect()
    assert connection.manifest().tensor_port is None
    assert_served(connection, tiny_served_model)
    assert connection.carrier == "gRPC"


def test_without_tls_there_is_no_tensor_port() -> None:
    server = Server("127.0.0.1", 0, None, tensor_port=0)
    assert server.tensor_port is None
    server.stop()


# ---- settings -------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigurationError, match="for tensors"):
        Server("127.0.0.1", 0, StateDir(tmp_path / "state"), tensor_port=taken.getsockname()[1])


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_all_addresses_are_all_addresses() -> None:
    """As for the gRPC port, the setting must include IPv4. Otherwise tenants with IPv4 would silently use gRPC, which
    is slower."""
    port = TensorPort("::", 0)
    try:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port.port), WAIT_S).close()
    finally:
        port.stop()


def settings(**given: Any) -> ProviderSettings:
    made = ProviderSettings(**given)
    made.check_conflicts()
    return made


@pytest.mark.parametrize("port", [0, 9000, 65_535, "none"])
def test_tensor_port_settings(port: int | str) -> None:
    assert settings(tls=True, tensor_port=port).tensor_port == port


@pytest.mark.parametrize("port", [-1, 65_536, "some", None, 1.5])
def test_what_is_no_port_is_refused(port: Any) -> None:
    with pytest.raises(ValueError, match="tensor_port"):
        settings(tls=True, tensor_port=port)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tls", "--port", "9000", "--tensor-port", "9000"], "different ports"),
        (["--tls", "--tensor-port", "9000", "--metrics-port", "9000"], "different ports"),
        (["--tensor-port", "9000"], "add --tls"),
        (["--tls", "--tensor-port", "65536"], "tensor_port"),
        (["--tls", "--tensor-port", "all"], "tensor_port"),
    ],
)
def test_a_wrong_tensor_port_is_one_line(
    tmp_path: Path, arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["provider", "serve", *arguments, "--state", str(tmp_path / "state")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code not in (0, None)
    shown = capsys.readouterr().err.strip()
    assert text in shown
    assert len(shown.splitlines()) == 1
