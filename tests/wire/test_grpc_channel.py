"""Tests that a tenant waits for a provider that does not answer yet and says so, and that a refusal is told at once."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from provider.identity.authority import StateDir
from provider.identity.registry import enroll, revoke
from provider.model.served_model import ServedModel
from provider.net.server import Server
from tenant_sdk.testing import save_tiny_model
from tests.support.providers import make_served_model, serving
from wire.errors import (
    ConfigurationError,
    DeadlineExceeded,
    MalformedFrame,
    NotPermitted,
    Unauthenticated,
    Unavailable,
    VeilbaseError,
    VersionMismatch,
)
from wire.transport import grpc_channel
from wire.transport.grpc_channel import first_chunk, offered_at_once, wait_for_provider
from wire.transport.grpc_connection import GrpcConnection
from wire.transport.identity import TlsIdentity


@pytest.fixture(scope="module")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return make_served_model(save_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(autouse=True)
def _short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_channel, "FIRST_CALL_S", 0.3)


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.fixture
def ending() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


def test_a_port_that_is_not_open_yet_is_waited_for(
    closed_port: int, served_model: ServedModel, ending: contextlib.ExitStack
) -> None:
    lines: list[str] = []

    def start(_: float) -> None:
        ending.enter_context(serving(served_model, closed_port))

    wait_for_provider(f"grpc://127.0.0.1:{closed_port}", None, lines.append, pause=start)
    (line,) = lines
    assert line.startswith(f"waiting for the provider at 127.0.0.1:{closed_port}, for up to 20 s: it is not listening")


def test_a_provider_that_loads_is_waited_for(served_model: ServedModel, ending: contextlib.ExitStack) -> None:
    """A provider binds its port before it loads its model; connections wait until it has."""
    server, lines = Server("127.0.0.1", 0, None), list[str]()
    ending.callback(server.stop)
    wait_for_provider(
        f"grpc://127.0.0.1:{server.port}", None, lines.append, pause=lambda _: server.start(served_model) and None
    )
    (line,) = lines
    assert "for up to 600 s: its port is open, and nobody answers yet: it is still loading its model" in line


def test_a_provider_that_answers_is_not_waited_for(served_model: ServedModel, closed_port: int) -> None:
    with serving(served_model) as server:
        url = f"grpc://127.0.0.1:{server.port}"
        manifest = GrpcConnection(url).manifest()
        assert wait_for_provider(url, None, pytest.fail) == offered_at_once(url, None) == manifest
        file = next(each for each in manifest.bundle if each.name == "config.json")
        assert len(first_chunk(url, None, file.name)) == file.size_bytes
        assert first_chunk(url, None, "nothing") == b""
    assert offered_at_once(f"grpc://127.0.0.1:{closed_port}", None) is None
    assert first_chunk(f"grpc://127.0.0.1:{closed_port}", None, "config.json") == b""


def test_a_manifest_that_does_not_come_whole_is_left_to_the_session(ending: contextlib.ExitStack) -> None:
    def half(_: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"{"
        ended = threading.Event()
        context.add_callback(ended.set)
        ended.wait(30)

    url = answering(half, ending)
    assert wait_for_provider(url, None, pytest.fail, pause=pytest.fail) is None
    assert offered_at_once(url, None) is None


@pytest.mark.parametrize(
    ("content", "error"), [(b"[]", VersionMismatch), (b"{", MalformedFrame), (b'{"protocol": 2}', MalformedFrame)]
)
def test_what_is_no_manifest_is_told_at_once(
    content: bytes, error: type[VeilbaseError], ending: contextlib.ExitStack
) -> None:
    url = answering(lambda *_: iter([content]), ending)
    with pytest.raises(error):
        wait_for_provider(url, None, pytest.fail, pause=pytest.fail)
    with pytest.raises(error):
        offered_at_once(url, None)


def test_a_manifest_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch, ending: contextlib.ExitStack) -> None:
    monkeypatch.setattr(grpc_channel, "MAX_MANIFEST_BYTES", 100)
    url = answering(lambda *_: itertools.repeat(b" " * 60), ending)
    with pytest.raises(MalformedFrame, match="at most 100 bytes"):
        wait_for_provider(url, None, pytest.fail, pause=pytest.fail)


def answering(manifest: Callable[..., Iterator[bytes]], ending: contextlib.ExitStack) -> str:
    """Returns the URL of what answers each call with the messages that `manifest` gives."""

    class Answers(grpc.GenericRpcHandler):
        def service(self, _: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.unary_stream_rpc_method_handler(manifest)

    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[Answers()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ending.callback(lambda: server.stop(None).wait())
    return f"grpc://127.0.0.1:{port}"


def test_a_wait_has_an_end(closed_port: int) -> None:
    lines: list[str] = []
    clock = itertools.count(0, 15).__next__
    with pytest.raises(Unavailable, match=f"nothing listens on port {closed_port}: check the port"):
        wait_for_provider(f"grpc://127.0.0.1:{closed_port}", None, lines.append, clock, lambda _: None)
    assert len(lines) == 1


def test_what_no_wait_would_mend_is_told_at_once(served_model: ServedModel, tmp_path: Path) -> None:
    lines: list[str] = []
    with serving(served_model, state=StateDir(tmp_path / "state")) as server:
        url = f"grpcs://127.0.0.1:{server.port}"
        for name, state in (("acme", tmp_path / "state"), ("other", tmp_path / "others")):
            enroll(StateDir(state), name, tmp_path / name, url)
        wait_for_provider(url, TlsIdentity.read(tmp_path / "acme"), lines.append)
        revoke(StateDir(tmp_path / "state"), "acme")
        with pytest.raises(NotPermitted, match="has revoked this identity"):
            wait_for_provider(url, TlsIdentity.read(tmp_path / "acme"), lines.append)
        with pytest.raises(Unauthenticated):
            wait_for_provider(url, TlsIdentity.read(tmp_path / "other"), lines.append)
    assert not lines


def test_a_name_that_the_certificate_does_not_hold_is_told_at_once(
    served_model: ServedModel, tmp_path: Path, ending: contextlib.ExitStack
) -> None:
    state = StateDir(tmp_path / "state")
    server = Server("127.0.0.1", 0, state)
    ending.callback(server.stop)
    server.start(served_model)
    url = f"grpcs://127.1:{server.port}"  # 127.0.0.1 by a name that no certificate holds
    enroll(state, "acme", tmp_path / "acme", url)
    identity = TlsIdentity.read(tmp_path / "acme")
    told = r"does not hold the name 127\.1: it holds localhost.*127\.0\.0\.1, ::1.*--names 127\.1`$"
    with pytest.raises(ConfigurationError, match=told):
        wait_for_provider(url, identity, pytest.fail, pause=pytest.fail)
    with pytest.raises(ConfigurationError, match=told):
        GrpcConnection(url, identity).manifest()


def test_names_of_a_certificate_are_few_short_and_printable() -> None:
    names = [("URI", "x"), ("DNS", "\x1b[2J" + "a" * 1000), *[("DNS", f"host{number}") for number in range(50)]]
    text = grpc_channel.names_held({"subjectAltName": names})
    assert text.startswith("\\x1b[2Jaaa")
    assert text.endswith("host6, 43 more")
    assert len(text) < 200


def test_a_handshake_that_drips_has_an_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(grpc_channel, "NAMES_S", 0.2)
    enroll(StateDir(tmp_path / "state"), "acme", tmp_path / "acme", "grpcs://127.0.0.1:1")

    def drip() -> None:
        taken, _ = listening.accept()
        with taken, contextlib.suppress(OSError):
            for byte in itertools.chain(b"\x16\x03\x03\x3f\xff\x02\x00\x3f\xfb", itertools.repeat(0, 200)):
                taken.sendall(bytes([byte]))
                time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=drip)
        thread.start()
        began = time.monotonic()
        grpc_channel.check_name(f"grpcs://127.0.0.1:{listening.getsockname()[1]}", TlsIdentity.read(tmp_path / "acme"))
        assert time.monotonic() - began < 5
        thread.join()


def test_a_name_without_an_address_is_told_at_once(monkeypatch: pytest.MonkeyPatch, closed_port: int) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "create_connection", unknown)
    with pytest.raises(Unavailable, match="has no address"):
        wait_for_provider(f"grpc://127.0.0.1:{closed_port}", None, pytest.fail)


def test_a_provider_that_only_a_proxy_reaches_gets_the_time_of_a_connection(
    monkeypatch: pytest.MonkeyPatch, closed_port: int
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise TimeoutError

    calls: list[float] = []
    outcomes: list[VeilbaseError | bytes] = [DeadlineExceeded("silent"), b""]
    monkeypatch.setattr(socket, "create_connection", unreachable)
    monkeypatch.setattr(grpc_channel, "ask", lambda _, __, seconds: (calls.append(seconds), outcomes.pop(0))[1])
    lines: list[str] = []
    wait_for_provider(f"grpc://127.0.0.1:{closed_port}", None, lines.append)
    assert calls == [0.3, 20.0]
    assert len(lines) == 1
    outcomes += [DeadlineExceeded("silent")] * 2
    with pytest.raises(Unavailable, match=r"cannot be reached \(no answer\)"):
        wait_for_provider(f"grpc://127.0.0.1:{closed_port}", None, lines.append)


def test_a_provider_that_says_deadline_exceeded_is_not_waited_for(ending: contextlib.ExitStack) -> None:
    """A wait for one that loads takes ten minutes, in which a hostile one could keep a command."""

    def manifest(_: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "")
        yield b""

    wait_for_provider(answering(manifest, ending), None, pytest.fail, pause=pytest.fail)
