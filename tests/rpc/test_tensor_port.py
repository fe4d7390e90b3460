"""The tensor port under bad weather: strangers, floods, tenants that do not read, restarts, and what is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import provider.net.service as service_module
import provider.net.tensor_port as port_module
from provider.cli import main
from provider.config import ProviderSettings
from provider.identity.authority import StateDir
from provider.identity.registry import enroll, revoke
from provider.model.served_model import ServedModel
from provider.net.server import Server
from provider.net.session import Session
from provider.net.tensor_port import TensorPort
from tests.rpc.conftest import Provider
from tests.rpc.links import TIMEOUT_S, connect
from tests.rpc.test_hostile_tenant import QUICK_S, service_of, session_of, until
from tests.rpc.test_stream import CALL, COLS, REPLY_COLS, RawStream, ask, assert_served, ring_rows
from tests.rpc.test_tls import expired_identity, foreign_identity, unregistered_identity
from wire import frame
from wire.errors import ConfigurationError, Unavailable, VeilbaseError, WireCode
from wire.frame import FrameType, Header
from wire.limits import MAX_FRAME_BYTES
from wire.transport import tls_socket
from wire.transport.grpc_stream import GrpcStream
from wire.transport.identity import TlsIdentity
from wire.transport.tls_socket import MessageSocket, client_context, handshake
from wire.transport.tls_stream import TensorStream

LARGE_ROWS = 4096
"""A reply of 1 MiB."""
SMALLEST = 2048
"""Bytes of the receive buffer of a tenant that does not read."""


@pytest.fixture
def quick_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes before `provider`, whose first wait begins when it starts."""
    monkeypatch.setattr(service_module, "SWEEP_S", QUICK_S)


@pytest.fixture
def unhandled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread ends with an exception that nobody caught."""
    caught: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", caught.append)
    yield
    assert not [one.exc_type for one in caught]


def dial(provider: Provider) -> socket.socket:
    assert provider.server.tensor_port is not None
    return socket.create_connection(("127.0.0.1", provider.server.tensor_port), TIMEOUT_S)


def tensors_of(provider: Provider) -> TensorPort:
    assert provider.server._tensors is not None
    return provider.server._tensors


def stream_threads() -> set[int | None]:
    return {one.ident for one in threading.enumerate() if one.name == "veilbase-stream"}


def assert_ends(plain: socket.socket) -> None:
    """The other side ends it, whatever it says before."""
    plain.settimeout(TIMEOUT_S)
    with contextlib.suppress(ConnectionError):
        while plain.recv(1 << 16):
            pass
    plain.close()


def assert_nothing_left(provider: Provider) -> None:
    service = service_of(provider)
    until(lambda: not service._sessions, "the end of the sessions")
    until(lambda: not service._calls, "their places are free")
    until(lambda: not tensors_of(provider)._open, "the end of the connections")
    assert not tensors_of(provider)._guests


def kind_of(connection: Any) -> type:
    return type(connection._stream._stream)


def say(connection: MessageSocket, *messages: bytes) -> None:
    """As much as the connection takes."""
    with contextlib.suppress(OSError):
        for message in messages:
            connection.send(message)


def hear(connection: MessageSocket) -> Header:
    while (message := connection.next_message()) is None:
        try:
            connection.wait()
        except EOFError:
            if (message := connection.next_message()) is None:
                raise
            break
    return frame.parse(message)[0]


# ---- strangers ------------------------------------------------------------------------------------------------------


def test_silent_connections_hold_up_nobody(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_socket, "HANDSHAKE_TIMEOUT_S", 10 * TIMEOUT_S)  # nor is the end of their time waited for
    monkeypatch.setattr("provider.net.tensor_port._STOP_S", 10 * TIMEOUT_S)
    silent = [dial(provider) for _ in range(20)]
    until(lambda: len(tensors_of(provider)._guests) == 20, "all are let in")
    assert_served(provider.connect(), provider.core)
    assert kind_of(provider.connections[0]) is TensorStream
    began = time.monotonic()
    provider.server.stop()
    assert time.monotonic() - began < TIMEOUT_S
    for one in silent:
        assert_ends(one)
    until(lambda: not tensors_of(provider)._open, "the end of the connections")


def test_a_silent_connection_has_until_the_deadline(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_socket, "HANDSHAKE_TIMEOUT_S", 0.2)
    assert_ends(dial(provider))
    assert_nothing_left(provider)


def half_a_hello(provider: Provider) -> bytes:
    outgoing = ssl.MemoryBIO()
    identity = provider.identity()
    context = client_context(identity.ca_pem, identity.cert_pem, identity.key_pem)
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="127.0.0.1").do_handshake()
    whole = outgoing.read()
    return whole[: len(whole) // 2]


@pytest.mark.parametrize(
    "what",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\0" * 5000,
        b"\xff" * 100_000,
        struct.pack("<I", 52) + frame.hello(FrameType.HELLO),
        half_a_hello,
    ],
)
def test_what_is_no_handshake_leaves_nothing(
    unhandled: None, provider: Provider, what: bytes | Callable[[Provider], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    for is_ended in (True, False):
        plain = dial(provider)
        with contextlib.suppress(ConnectionError):
            plain.sendall(what if isinstance(what, bytes) else what(provider))
            if is_ended:
                plain.shutdown(socket.SHUT_WR)
                assert_ends(plain)
        plain.close()
    assert_nothing_left(provider)
    assert_served(provider.connect(), provider.core)
    assert not caplog.records  # anybody can do this: it must not fill the log


@pytest.mark.parametrize("make", [foreign_identity, expired_identity])
def test_a_certificate_that_is_not_valid_is_refused_by_tls(
    provider: Provider, tmp_path: Path, make: Callable[[Path, Provider], TlsIdentity]
) -> None:
    identity = make(tmp_path, provider)
    context = client_context(identity.ca_pem, identity.cert_pem, identity.key_pem)
    with pytest.raises(OSError):
        hear(handshake(dial(provider), context, "127.0.0.1"))
    assert_nothing_left(provider)


def test_no_certificate_is_refused_by_tls(provider: Provider) -> None:
    context = ssl.create_default_context(cadata=provider.state.ca.pem.decode())
    context.set_alpn_protocols([tls_socket.ALPN])
    with pytest.raises(OSError):
        hear(handshake(dial(provider), context, "127.0.0.1"))
    assert_nothing_left(provider)


def revoked_identity(tmp_path: Path, provider: Provider) -> TlsIdentity:
    identity = provider.identity("fired")
    revoke(provider.state, "fired")
    return identity


def shards_identity(tmp_path: Path, provider: Provider) -> TlsIdentity:
    enroll(provider.state, "host", tmp_path / "host", provider.url, role="shard")
    return TlsIdentity.read(tmp_path / "host")


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (revoked_identity, WireCode.NOT_PERMITTED),
        (unregistered_identity, WireCode.UNAUTHENTICATED),
        (shards_identity, WireCode.UNAUTHENTICATED),
    ],
)
def test_who_is_no_tenant_is_told_and_gets_no_session(
    provider: Provider, tmp_path: Path, make: Callable[[Path, Provider], TlsIdentity], code: WireCode
) -> None:
    identity = make(tmp_path, provider)
    context = client_context(identity.ca_pem, identity.cert_pem, identity.key_pem)
    connection = handshake(dial(provider), context, "127.0.0.1")
    say(connection, frame.hello(FrameType.HELLO), Header(FrameType.REQUEST, 1, CALL, 0, COLS, deadline_ms=1000).pack())
    last = hear(connection)
    assert (last.kind, last.request_id, WireCode(last.code)) == (FrameType.ERROR, 0, code)
    with pytest.raises(EOFError):
        hear(connection)
    connection.release()
    assert_nothing_left(provider)


# ---- too many -------------------------------------------------------------------------------------------------------


@pytest.fixture
def few_places(monkeypatch: pytest.MonkeyPatch) -> int:
    """Goes before `provider`."""
    monkeypatch.setattr(port_module, "MAX_CONNECTIONS", 4)
    return 4


def test_strangers_do_not_shut_tenants_out(few_places: int, provider: Provider) -> None:
    """Anybody can connect and say nothing, as often as he likes."""
    silent = [dial(provider) for _ in range(few_places)]
    until(lambda: len(tensors_of(provider)._guests) == few_places, "no place is left")
    assert_served(provider.connect(), provider.core)
    assert kind_of(provider.connections[0]) is TensorStream
    assert_ends(silent.pop(0))  # the oldest
    until(lambda: len(tensors_of(provider)._guests) == few_places - 1, "the others have stayed")
    for one in silent:
        one.close()


def test_tenants_that_were_refused_do_not_shut_others_out(few_places: int, provider: Provider) -> None:
    """They are told why, and given time to read it."""
    identity = provider.identity("fired")
    revoke(provider.state, "fired")
    context = client_context(identity.ca_pem, identity.cert_pem, identity.key_pem)
    refused = [handshake(dial(provider), context, "127.0.0.1") for _ in range(few_places)]
    until(lambda: len(tensors_of(provider)._guests) == few_places, "no place is left")
    assert_served(provider.connect(), provider.core)
    assert kind_of(provider.connections[0]) is TensorStream
    for one in refused:
        one.release()


def test_streams_are_not_sent_away_for_newer_connections(few_places: int, provider: Provider) -> None:
    streams = [RawStream(provider, f"tenant{number}") for number in range(few_places)]
    connection = provider.connect("late")
    assert_served(connection, provider.core)
    assert kind_of(connection) is GrpcStream  # the other way
    for stream in streams:
        stream.send(*stream.request(1, ring_rows(1)))
        assert stream.receive().request_id == 1
        stream.close()
    until(lambda: [one.tenant for one in list(service_of(provider)._sessions)] == ["late"], "the others' end")


class Moody:
    """A listener whose `accept` fails now and then."""

    def __init__(self, listener: socket.socket, failures: int) -> None:
        self._listener, self.failures = listener, failures

    def accept(self) -> tuple[socket.socket, Any]:
        plain, address = self._listener.accept()
        if self.failures > 0:
            self.failures -= 1
            plain.close()
            raise OSError(24, "Too many open files")
        return plain, address

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


def test_the_port_goes_on_after_it_had_no_file_left(provider: Provider) -> None:
    tensors = tensors_of(provider)
    tensors._listener = Moody(tensors._listener, 2)  # type: ignore[assignment]
    for _ in range(3):  # the first is in `accept` already
        dial(provider).close()
    until(lambda: tensors._listener.failures == 0, "the failures")  # type: ignore[attr-defined]
    assert_served(provider.connect(), provider.core)
    assert kind_of(provider.connections[0]) is TensorStream


def test_the_port_goes_on_after_the_machine_had_no_thread_left(
    unhandled: None, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failed = threading.Thread.start, threading.Event()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "veilbase-stream" and not failed.is_set():
            failed.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert_ends(dial(provider))
    assert failed.is_set()
    assert_served(provider.connect(), provider.core)
    assert kind_of(provider.connections[0]) is TensorStream
    free = tensors_of(provider)._places
    assert free._value == port_module.MAX_CONNECTIONS - 1  # type: ignore[attr-defined]


def test_a_stream_for_which_no_descriptor_is_left_costs_only_itself(
    unhandled: None, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def full(count: int, flags: int) -> int:
            raise OSError(24, "Too many open files")

        patch.setattr(os, "eventfd", full)
        connection = connect(provider, "unlucky")
        with pytest.raises(OSError):
            hear(connection)
        connection.release()
        assert_nothing_left(provider)
    assert_served(provider.connect(), provider.core)


# ---- a tenant that does not read ------------------------------------------------------------------------------------


class Deaf:
    """Says HELLO, asks for large replies, and never reads."""

    def __init__(self, provider: Provider) -> None:
        self.connection = connect(provider, "deaf", receive_bytes=SMALLEST)
        self.connection.send(frame.hello(FrameType.HELLO))
        self._next = 1

    def ask(self, deadline_ms: int = 30_000) -> None:
        size = LARGE_ROWS * COLS * 4
        header = Header(FrameType.REQUEST, self._next, CALL, LARGE_ROWS, COLS, 0, size, deadline_ms)
        self._next += 1
        for message in frame.frames(header, memoryview(bytes(size))):
            self.connection.send(message)
            while self.connection.has_unsent:
                self.connection.wait_to_send(0.1)

    def block(self, provider: Provider) -> tuple[Session, MessageSocket]:
        """Asks until the provider cannot send any more; its session and connection."""
        session = session_of(provider, "deaf")
        (theirs,) = [one for one in tensors_of(provider)._open if isinstance(one, MessageSocket)]
        for _ in range(64):  # the kernel's buffers take some replies
            self.ask()
            until(lambda: session.is_idle or theirs.has_unsent, "a reply on its way")
            left = -1
            while theirs.has_unsent and left != len(theirs._cipher):  # the kernel may still be taking it
                left = len(theirs._cipher)
                threading.Event().wait(4 * QUICK_S)
            if theirs.has_unsent:
                return session, theirs
        raise AssertionError("the kernel took everything")


@pytest.fixture
def deaf(quick_sweeps: None, provider: Provider) -> Iterator[Deaf]:
    made = Deaf(provider)
    yield made
    made.connection.release()


def test_a_deaf_tenant_that_is_revoked_is_dropped(unhandled: None, provider: Provider, deaf: Deaf) -> None:
    session, _ = deaf.block(provider)
    deaf.ask()
    revoke(provider.state, "deaf")
    assert_nothing_left(provider)
    assert session._held_bytes == 0
    assert not session._replies


def test_a_deaf_tenant_that_goes_away_is_dropped(unhandled: None, provider: Provider, deaf: Deaf) -> None:
    session, _ = deaf.block(provider)
    deaf.ask()
    deaf.connection.release()
    assert_nothing_left(provider)
    assert session._held_bytes == 0


def test_a_deaf_tenants_requests_expire(provider: Provider, deaf: Deaf) -> None:
    session, theirs = deaf.block(provider)
    deaf.ask(deadline_ms=1)
    until(lambda: deaf._next - 1 not in session._requests, "the end of what expired")
    assert theirs.has_unsent
    assert_served(provider.connect("modest"), provider.core)


def test_a_deaf_tenant_with_too_many_answers_is_dropped(
    unhandled: None, provider: Provider, deaf: Deaf, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf.block(provider)
    monkeypatch.setattr("provider.net.session.MAX_REQUESTS", 8)
    for number in range(1000, 1020):
        say(deaf.connection, Header(FrameType.REQUEST, number, CALL, 0, COLS, deadline_ms=0).pack())
    assert_nothing_left(provider)


def test_a_provider_that_stops_does_not_wait_for_a_deaf_tenant(provider: Provider, deaf: Deaf) -> None:
    deaf.block(provider)
    began = time.monotonic()
    provider.server.stop()
    assert time.monotonic() - began < TIMEOUT_S  # its connection would hold for UNREAD_TIMEOUT_MS, five minutes
    assert_nothing_left(provider)


# ---- ends and rubbish -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_said", [True, False])
def test_an_end_in_the_middle_of_a_frame_leaves_nothing(provider: Provider, is_said: bool) -> None:
    connection = connect(provider, "cut")
    say(connection, frame.hello(FrameType.HELLO))
    assert hear(connection).kind is FrameType.WELCOME
    connection._tls.write(struct.pack("<I", 1000) + b"\x03" * 400)
    connection._plain.sendall(connection._outgoing.read())
    if is_said:
        connection.end_sending()
        with pytest.raises(EOFError):
            hear(connection)
    connection.release()
    assert_nothing_left(provider)


def test_a_length_above_the_limit_ends_the_stream_with_one_error(provider: Provider) -> None:
    connection = connect(provider, "long")
    say(connection, frame.hello(FrameType.HELLO))
    assert hear(connection).kind is FrameType.WELCOME
    connection._tls.write(struct.pack("<I", MAX_FRAME_BYTES + 1) + b"\x03" * 4000)
    connection._plain.sendall(connection._outgoing.read())
    last = hear(connection)
    assert (last.kind, last.request_id, WireCode(last.code)) == (FrameType.ERROR, 0, WireCode.MALFORMED)
    with pytest.raises(EOFError):
        hear(connection)
    connection.release()
    assert_nothing_left(provider)


def rubbish(dice: random.Random) -> bytes:
    """Bytes that are messages, nearly messages, or not."""
    parts = [struct.pack("<I", 52) + frame.hello(FrameType.HELLO)] if dice.random() < 0.8 else []
    for _ in range(dice.randrange(12)):
        rows = dice.choice([0, 1, 9])
        good = Header(FrameType.REQUEST, dice.randrange(5), CALL, rows, COLS, 0, rows * COLS * 4, 1000).pack()
        body = bytearray(good + bytes(rows * COLS * 4))
        for _ in range(dice.choice([0, 0, 1, 3])):
            body[dice.randrange(len(body))] = dice.randrange(256)
        length = len(body) if dice.random() < 0.9 else dice.choice([0, 47, 1 << 20, MAX_FRAME_BYTES + 1, 0xFFFFFFFF])
        parts.append(struct.pack("<I", length) + body)
    return b"".join(parts) + dice.randbytes(dice.choice([0, 0, 3, 500]))


def test_rubbish_after_the_handshake_leaves_nothing(unhandled: None, provider: Provider) -> None:
    dice = random.Random(7)
    provider.identity("fuzz")
    assert_served(provider.connect("honest"), provider.core)
    threads, files = stream_threads(), len(os.listdir("/proc/self/fd"))
    service = service_of(provider)
    for _ in range(60):
        connection = connect(provider, "fuzz")
        with contextlib.suppress(OSError, EOFError, VeilbaseError):
            data = rubbish(dice)
            for start in range(0, len(data), 4096):
                connection._tls.write(data[start : start + 4096])
                connection._plain.sendall(connection._outgoing.read())
            if dice.random() < 0.5:
                connection.end_sending()
            while dice.random() < 0.7 and connection._poll(select.POLLIN, QUICK_S):
                connection.receive()
        connection.release()
    until(lambda: not [one for one in list(service._sessions) if one.tenant == "fuzz"], "the end of the sessions")
    until(lambda: not service._calls.get("fuzz"), "their places are free")
    until(lambda: stream_threads() <= threads, "the end of the threads")
    until(lambda: len(os.listdir("/proc/self/fd")) <= files, "the end of the files")
    assert_served(provider.connections[0], provider.core)


def test_many_threads_of_many_tenants(unhandled: None, provider: Provider) -> None:
    """With thread switches nearly everywhere: no wake-up is lost and no reply is another's."""
    tenants = [provider.connect(f"tenant{number}") for number in range(3)]
    expected = {count: (rows := ring_rows(count), provider.core.compute(CALL, rows)) for count in (0, 1, 9, 300)}

    def work(number: int) -> int:
        wrong = 0
        for turn in range(120):
            rows, reply = expected[(0, 1, 9, 300)[(number + turn) % 4]]
            wrong += not torch.equal(ask(tenants[number % 3], rows), reply)
        return wrong

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(6) as pool:
            assert sum(pool.map(work, range(6), timeout=100)) == 0
    finally:
        sys.setswitchinterval(before)


def test_an_idle_stream_costs_no_time(provider: Provider) -> None:
    """Nor does one that is half closed, or one that is over and whose tenant does not go."""
    idle, half, over = (connect(provider, name) for name in ("idle", "half", "over"))
    for one in (idle, half, over):
        say(one, frame.hello(FrameType.HELLO))
        assert hear(one).kind is FrameType.WELCOME
    size = COLS * 4  # a request whose rest does not come
    say(half, Header(FrameType.REQUEST, 1, CALL, 1, COLS, 0, size, 60_000).pack() + b"\0" * 4)
    half._tls.write(struct.pack("<I", 1000))
    half._plain.sendall(half._outgoing.read())
    say(over, b"\xff" * 100)
    assert hear(over).kind is FrameType.ERROR
    began = time.process_time()
    threading.Event().wait(1.0)
    assert time.process_time() - began < 0.3
    for one in (idle, half, over):
        one.release()
    assert_nothing_left(provider)


# ---- stops and restarts ---------------------------------------------------------------------------------------------


def test_a_stop_tells_open_streams(provider: Provider) -> None:
    streams = [RawStream(provider, f"tenant{number}") for number in range(3)]
    provider.server.stop()
    for stream in streams:
        stream.expect_error(0, WireCode.UNAVAILABLE)
        stream.expect_end()
        stream.close()
    with pytest.raises(OSError):
        dial(provider)


def test_a_drain_answers_what_is_in_flight_and_refuses_the_rest(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = RawStream(provider)
    begun, release = threading.Event(), threading.Event()
    (lane,) = service_of(provider)._executor.executors[0]._lanes
    product = lane.replica.product  # type: ignore[attr-defined]

    def slow(*arguments: Any) -> torch.Tensor:
        begun.set()
        release.wait(TIMEOUT_S)
        result: torch.Tensor = product(*arguments)
        return result

    monkeypatch.setattr(lane.replica, "product", slow)
    stream.send(*stream.request(1, ring_rows(50)))
    assert begun.wait(TIMEOUT_S)
    stopping = threading.Thread(target=provider.server.stop, args=(TIMEOUT_S,))
    stopping.start()
    until(lambda: service_of(provider)._is_draining, "the drain")
    until(lambda: all(one._draining for one in list(service_of(provider)._sessions)), "every stream knows")
    stream.send(*stream.request(2, ring_rows(50)))
    assert stream.receive().request_id == 2
    late = RawStream(provider, "late", greet=False)
    late.expect_error(0, WireCode.UNAVAILABLE)
    release.set()
    reply = stream.receive()
    assert (reply.kind, reply.request_id) == (FrameType.REPLY, 1)
    stream.expect_error(0, WireCode.UNAVAILABLE)
    stopping.join(TIMEOUT_S)
    for one in (stream, late):
        one.close()


def test_grpc_carries_the_stream_where_the_port_is_closed(provider: Provider) -> None:
    tensors_of(provider).stop()
    connection = provider.connect()
    assert connection.manifest().tensor_port == provider.server.tensor_port
    for _ in range(2):
        assert_served(connection, provider.core)
    assert kind_of(connection) is GrpcStream


def test_grpc_carries_the_stream_where_something_else_answers(provider: Provider) -> None:
    connection = provider.connect()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            plain, _ = listener.accept()
            plain.sendall(b"220 mail.example ESMTP\r\n")
            plain.close()

        thread = threading.Thread(target=answer)
        thread.start()
        port = listener.getsockname()[1]
        connection._manifest = connection.manifest().model_copy(update={"tensor_port": port})
        assert_served(connection, provider.core)
        thread.join(TIMEOUT_S)
    assert kind_of(connection) is GrpcStream


def restarted(old: Provider, state: StateDir, core: ServedModel) -> Server:
    """Another provider at the same URL, with another tensor port."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = other.getsockname()[1]
    server = Server("127.0.0.1", old.server.port, state, tensor_port=free)
    server.start(core)
    return server


def test_after_a_restart_the_new_port_is_used_and_nothing_is_sent_twice(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []
    receive = Session.receive

    def note(session: Session, message: bytes) -> bool:
        if message[0] == FrameType.REQUEST:
            asked.append(bytes(message[frame.HEADER_BYTES :]))
        return receive(session, message)

    monkeypatch.setattr(Session, "receive", note)
    connection = provider.connect()
    assert_served(connection, provider.core)
    (lane,) = service_of(provider)._executor.executors[0]._lanes
    begun, release = threading.Event(), threading.Event()

    def slow(*_: Any) -> torch.Tensor:
        begun.set()
        release.wait(TIMEOUT_S)
        return torch.zeros(50, REPLY_COLS, dtype=torch.int32)

    monkeypatch.setattr(lane.replica, "product", slow)
    pending = connection.submit(CALL, ring_rows(50), REPLY_COLS)
    assert begun.wait(TIMEOUT_S)
    stopping = threading.Thread(target=provider.server.stop)
    stopping.start()
    with pytest.raises(Unavailable):
        pending.result()
    release.set()
    stopping.join(TIMEOUT_S)
    server = restarted(provider, provider.state, provider.core)
    try:
        assert server.tensor_port != provider.server.tensor_port
        assert_served(connection, provider.core)
        assert kind_of(connection) is TensorStream
        assert connection._port == server.tensor_port
    finally:
        connection.close()
        server.stop()
    assert len(asked) == len(set(asked)) == 3


def test_a_port_that_is_another_providers_by_now_gets_no_rows(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two providers of one operator have one CA, and a port that one gave back the other may get."""
    connection = provider.connect()
    other = Server("127.0.0.1", 0, provider.state)
    service = other.start(provider.core)
    seen: list[int] = []
    receive = Session.receive

    def note(session: Session, message: bytes) -> bool:
        if session in service._sessions:
            seen.append(message[0])
        return receive(session, message)

    monkeypatch.setattr(Session, "receive", note)
    try:
        connection._manifest = connection.manifest().model_copy(update={"tensor_port": other.tensor_port})
        with pytest.raises(Unavailable, match="nothing was sent"):
            ask(connection, ring_rows(1))
        assert set(seen) == {FrameType.HELLO}
        assert_served(connection, provider.core)  # asked again, it finds its own
        assert connection._port == provider.server.tensor_port
    finally:
        other.stop()


def test_without_a_tensor_port_the_manifest_names_none(start: Callable[..., Provider], tiny_core: ServedModel) -> None:
    connection = start(tiny_core, tensor_port=None).connect()
    assert connection.manifest().tensor_port is None
    assert_served(connection, tiny_core)
    assert kind_of(connection) is GrpcStream


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
    """As of the gRPC port: a tenant with IPv4 would take the slow way and nobody would know why."""
    port = TensorPort("::", 0)
    try:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port.port), TIMEOUT_S).close()
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
