"""Tests the tensor port against peers without certificates, floods, tenants that do not read, and invalid bytes."""

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

import provider.net.ports as port_module
import provider.net.service as service_module
from provider.identity.registry import revoke
from provider.net.carrier import carry
from provider.net.session import Session
from tests.support.identities import expired_identity, foreign_identity, unregistered_identity
from tests.support.providers import QUICK_S, Provider, service_of, tensors_of
from tests.support.raw_peers import (
    RawStream,
    RawTls,
    assert_ends,
    carrier_of,
    connect,
    dial_tensor_port,
    hear,
    say,
)
from tests.support.ring_products import CALL, COLS, ask, assert_served, ring_rows
from tests.support.waiting import WAIT_S, until
from wire import frame
from wire.errors import VeilbaseError, WireCode
from wire.frame import FrameType, Header
from wire.limits import MAX_FRAME_BYTES
from wire.transport import tls
from wire.transport.identity import TlsIdentity
from wire.transport.message_socket import MessageSocket
from wire.transport.tls import ALPN, client_context, handshake

LARGE_ROWS = 4096
"""The number of rows of a reply of 1 MiB."""
SMALLEST = 2048
"""The size, in bytes, of the receive buffer of a tenant that does not read."""


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


@pytest.fixture
def unhandled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Checks that no thread ends with an uncaught exception."""
    caught: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", caught.append)
    yield
    assert not [one.exc_type for one in caught]


def refusals(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str | None]]:
    """Returns message and tenant of each line about a refusal."""
    found = [(one.getMessage(), getattr(one, "tenant", None)) for one in caplog.records]
    return [one for one in found if one[0].startswith("refused: ")]


# ---- strangers ------------------------------------------------------------------------------------------------------


def test_silent_connections_hold_up_nobody(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "HANDSHAKE_TIMEOUT_S", 10 * WAIT_S)  # nor is the end of their time waited for
    monkeypatch.setattr("provider.net.ports._STOP_S", 10 * WAIT_S)
    silent = [dial_tensor_port(provider) for _ in range(20)]
    until(lambda: tensors_of(provider).status().num_guests == 20, "all are let in")
    assert_served(provider.connect(), provider.served_model)
    assert provider.connections[0].carrier == carrier_of(provider)
    began = time.monotonic()
    provider.server.stop()
    assert time.monotonic() - began < WAIT_S
    for one in silent:
        assert_ends(one)
    until(lambda: not tensors_of(provider).status().num_connections, "the end of the connections")


def test_a_silent_connection_has_until_the_deadline(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "HANDSHAKE_TIMEOUT_S", 0.2)
    assert_ends(dial_tensor_port(provider))
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
        plain = dial_tensor_port(provider)
        with contextlib.suppress(ConnectionError):
            plain.sendall(what if isinstance(what, bytes) else what(provider))
            if is_ended:
                plain.shutdown(socket.SHUT_WR)
                assert_ends(plain)
        plain.close()
    assert_nothing_left(provider)
    assert_served(provider.connect(), provider.served_model)
    # Any peer can do this, so it must not fill the provider's log. The tenant's own log says what carries its stream.
    said = [one.getMessage() for one in caplog.records if one.name.startswith("provider")]
    only_hung_up = what in (b"", half_a_hello)
    assert said == [] if only_hung_up else said == ["refused: it does not speak TLS 1.3 with this protocol (TLS)"]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (foreign_identity, "its certificate is not of this provider's authority (TLS)"),
        (expired_identity, "its certificate has expired (TLS)"),
    ],
)
def test_a_certificate_that_is_not_valid_is_refused_by_tls(
    provider: Provider,
    tmp_path: Path,
    make: Callable[[Path, Provider], TlsIdentity],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    identity = make(tmp_path, provider)
    context = client_context(identity.ca_pem, identity.cert_pem, identity.key_pem)
    with pytest.raises(OSError):
        hear(handshake(dial_tensor_port(provider), context, "127.0.0.1"))
    assert_nothing_left(provider)
    assert refusals(caplog) == [(f"refused: {reason}", None)]


def test_no_certificate_is_refused_by_tls(provider: Provider, caplog: pytest.LogCaptureFixture) -> None:
    context = ssl.create_default_context(cadata=provider.state.ca.pem.decode())
    context.set_alpn_protocols([ALPN])
    with pytest.raises(OSError):
        hear(handshake(dial_tensor_port(provider), context, "127.0.0.1"))
    assert_nothing_left(provider)
    assert refusals(caplog) == [("refused: it has no certificate (TLS)", None)]


def revoked_identity(tmp_path: Path, provider: Provider) -> TlsIdentity:
    identity = provider.identity("fired")
    revoke(provider.state, "fired")
    return identity


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (revoked_identity, WireCode.NOT_PERMITTED),
        (unregistered_identity, WireCode.UNAUTHENTICATED),
    ],
)
def test_who_is_no_tenant_is_told_and_gets_no_session(
    provider: Provider, tmp_path: Path, make: Callable[[Path, Provider], TlsIdentity], code: WireCode
) -> None:
    identity = make(tmp_path, provider)
    context = client_context(identity.ca_pem, identity.cert_pem, identity.key_pem)
    connection = handshake(dial_tensor_port(provider), context, "127.0.0.1")
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
    """Allows only a few connections. This fixture must come before `provider`."""
    monkeypatch.setattr(port_module, "MAX_CONNECTIONS", 4)
    return 4


def test_strangers_do_not_shut_tenants_out(few_places: int, provider: Provider) -> None:
    """Peers without certificates connect and send nothing, again and again. A tenant can still connect."""
    silent = [dial_tensor_port(provider) for _ in range(few_places)]
    until(lambda: tensors_of(provider).status().num_guests == few_places, "no place is left")
    assert_served(provider.connect(), provider.served_model)
    assert provider.connections[0].carrier == carrier_of(provider)
    assert_ends(silent.pop(0))  # the oldest connection ends
    until(lambda: tensors_of(provider).status().num_guests == few_places - 1, "the others have stayed")
    for one in silent:
        one.close()


def test_tenants_that_were_refused_do_not_shut_others_out(few_places: int, provider: Provider) -> None:
    """Refused tenants get the reason and time to read it. Meanwhile, other tenants can still connect."""
    identity = provider.identity("fired")
    revoke(provider.state, "fired")
    context = client_context(identity.ca_pem, identity.cert_pem, identity.key_pem)
    refused = [handshake(dial_tensor_port(provider), context, "127.0.0.1") for _ in range(few_places)]
    until(lambda: tensors_of(provider).status().num_guests == few_places, "no place is left")
    assert_served(provider.connect(), provider.served_model)
    assert provider.connections[0].carrier == carrier_of(provider)
    for one in refused:
        one.release()


def test_streams_are_not_sent_away_for_newer_connections(few_places: int, provider: Provider) -> None:
    streams = [RawStream(provider, f"tenant{number}") for number in range(few_places)]
    connection = provider.connect("late")
    assert_served(connection, provider.served_model)
    assert connection.carrier == "gRPC"  # the stream uses gRPC instead
    for stream in streams:
        stream.send(*stream.request(1, ring_rows(1)))
        assert stream.receive().request_id == 1
        stream.close()
    until(lambda: [one.tenant for one in service_of(provider).sessions] == ["late"], "the others' end")


def test_the_port_goes_on_after_it_had_no_file_left(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, left = socket.socket.accept, [2]

    def accept_or_fail(listener: socket.socket) -> tuple[socket.socket, Any]:
        plain, address = accept(listener)
        if left[0] > 0 and plain.getsockname()[1] == provider.server.tensor_port:
            left[0] -= 1
            plain.close()
            raise OSError(24, "Too many open files")
        return plain, address

    monkeypatch.setattr(socket.socket, "accept", accept_or_fail)
    for _ in range(3):  # the first connection is already accepted
        dial_tensor_port(provider).close()
    until(lambda: left[0] == 0, "the failures")
    assert_served(provider.connect(), provider.served_model)
    assert provider.connections[0].carrier == carrier_of(provider)


def test_the_port_goes_on_after_the_machine_had_no_thread_left(
    unhandled: None, few_places: int, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, failed = threading.Thread.start, threading.Event()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "veilbase-stream" and not failed.is_set():
            failed.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert_ends(dial_tensor_port(provider))
    assert failed.is_set()
    connections = [provider.connect(f"tenant{number}") for number in range(few_places)]
    for connection in connections:
        assert_served(connection, provider.served_model)
    assert {connection.carrier for connection in connections} == {carrier_of(provider)}, "a place was lost"


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
    assert_served(provider.connect(), provider.served_model)


# ---- a tenant that does not read ------------------------------------------------------------------------------------


Carried = dict[str, tuple[Session, MessageSocket]]
"""Maps a tenant to its session and to the provider's end of its connection."""


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> Carried:
    """Returns a mapping to which every session that the tensor port begins from now on is added."""
    found: Carried = {}

    def note(session: Session, connection: MessageSocket, *others: Any) -> None:
        found[session.tenant] = session, connection
        carry(session, connection, *others)

    monkeypatch.setattr(service_module, "carry", note)
    return found


def is_ready(connection: MessageSocket, wanted: int, seconds: float) -> bool:
    """Waits for a limited time until a connection can be read or accepts more bytes."""
    poll = select.poll()
    poll.register(connection, wanted)
    return bool(poll.poll(1000 * seconds))


class Deaf:
    """Plays a tenant that sends HELLO, requests large replies, and never reads."""

    def __init__(self, provider: Provider, carried: Carried) -> None:
        self._carried, self._usage = carried, provider.service.usage.of("deaf")
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

    def block(self) -> tuple[Session, MessageSocket]:
        """Sends requests until the provider cannot send any more. Returns the session and its connection."""
        until(lambda: "deaf" in self._carried, "its session")
        session, theirs = self._carried["deaf"]
        for _ in range(64):  # the kernel's buffers take some replies
            self.ask()
            until(lambda: theirs.has_unsent or (self._is_counted() and session.is_idle), "a reply on its way")
            while theirs.has_unsent and is_ready(theirs, select.POLLOUT, 4 * QUICK_S):
                threading.Event().wait(QUICK_S)  # the kernel may still accept bytes
            if theirs.has_unsent:
                return session, theirs
        raise AssertionError("the kernel took everything")

    def _is_counted(self) -> bool:
        """Returns whether the provider has received every request; before it has, its session may look idle."""
        total = self._usage.total()
        return sum(total.requests.values()) + sum(total.errors.values()) == self._next - 1


@pytest.fixture
def few_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowers the limit on waiting replies. This fixture must come before `deaf`, whose stream reads the limit when it
    begins."""
    monkeypatch.setattr("provider.net.session.MAX_REQUESTS", 8)


@pytest.fixture
def deaf(quick_sweeps: None, provider: Provider, carried: Carried) -> Iterator[Deaf]:
    made = Deaf(provider, carried)
    yield made
    made.connection.release()


def test_a_deaf_tenant_that_is_revoked_is_dropped(unhandled: None, provider: Provider, deaf: Deaf) -> None:
    session, _ = deaf.block()
    deaf.ask()
    revoke(provider.state, "deaf")
    assert_nothing_left(provider)
    status = session.status()
    assert (status.held_bytes, status.num_half_sent) == (0, 0)


def test_a_deaf_tenant_that_goes_away_is_dropped(unhandled: None, provider: Provider, deaf: Deaf) -> None:
    session, _ = deaf.block()
    deaf.ask()
    deaf.connection.release()
    assert_nothing_left(provider)
    assert session.status().held_bytes == 0


def test_a_deaf_tenants_requests_expire(provider: Provider, deaf: Deaf) -> None:
    session, theirs = deaf.block()
    deaf.ask()  # it waits behind the blocked reply, or is refused because others wait
    until(lambda: session.status().num_requests > 0, "a request that is not answered")
    session.sweep(time.monotonic() + 60)
    assert provider.service.usage.of("deaf").total().errors["DEADLINE"] > 0
    assert theirs.has_unsent
    assert_served(provider.connect("modest"), provider.served_model)


def test_a_deaf_tenant_with_too_many_answers_is_dropped(
    unhandled: None, few_answers: None, provider: Provider, deaf: Deaf
) -> None:
    deaf.block()
    for number in range(1000, 1020):
        say(deaf.connection, Header(FrameType.REQUEST, number, CALL, 0, COLS, deadline_ms=0).pack())
    assert_nothing_left(provider)


def test_a_provider_that_stops_does_not_wait_for_a_deaf_tenant(provider: Provider, deaf: Deaf) -> None:
    deaf.block()
    began = time.monotonic()
    provider.server.stop()
    assert time.monotonic() - began < WAIT_S  # the connection alone would last UNREAD_TIMEOUT_MS, five minutes
    assert_nothing_left(provider)


# ---- ends and rubbish -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_said", [True, False])
def test_an_end_in_the_middle_of_a_frame_leaves_nothing(provider: Provider, is_said: bool) -> None:
    raw = RawTls(provider, "cut")
    connection = raw.connection
    say(connection, frame.hello(FrameType.HELLO))
    assert hear(connection).kind is FrameType.WELCOME
    raw.send(struct.pack("<I", 1000) + b"\x03" * 400)
    if is_said:
        connection.end_sending()
        with pytest.raises(EOFError):
            hear(connection)
    connection.release()
    assert_nothing_left(provider)


def test_a_length_above_the_limit_ends_the_stream_with_one_error(provider: Provider) -> None:
    raw = RawTls(provider, "long")
    connection = raw.connection
    say(connection, frame.hello(FrameType.HELLO))
    assert hear(connection).kind is FrameType.WELCOME
    raw.send(struct.pack("<I", MAX_FRAME_BYTES + 1) + b"\x03" * 4000)
    last = hear(connection)
    assert (last.kind, last.request_id, WireCode(last.code)) == (FrameType.ERROR, 0, WireCode.MALFORMED)
    with pytest.raises(EOFError):
        hear(connection)
    connection.release()
    assert_nothing_left(provider)


def rubbish(dice: random.Random) -> bytes:
    """Returns random bytes: some are messages, some are messages with changed bytes, and some are no messages."""
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
    assert_served(provider.connect("honest"), provider.served_model)
    threads, files = stream_threads(), len(os.listdir("/proc/self/fd"))
    service = service_of(provider)
    for _ in range(60):
        raw = RawTls(provider, "fuzz")
        connection = raw.connection
        with contextlib.suppress(OSError, EOFError, VeilbaseError):
            data = rubbish(dice)
            for start in range(0, len(data), 4096):
                raw.send(data[start : start + 4096])
            if dice.random() < 0.5:
                connection.end_sending()
            while dice.random() < 0.7 and is_ready(connection, select.POLLIN, QUICK_S):
                connection.receive()
        connection.release()
    until(lambda: not [one for one in service.sessions if one.tenant == "fuzz"], "the end of the sessions")
    until(lambda: "fuzz" not in service.status().calls, "their places are free")
    until(lambda: stream_threads() <= threads, "the end of the threads")
    until(lambda: len(os.listdir("/proc/self/fd")) <= files, "the end of the files")
    assert_served(provider.connections[0], provider.served_model)


def test_many_threads_of_many_tenants(unhandled: None, provider: Provider) -> None:
    """Threads switch nearly everywhere. No wake-up may be lost, and no reply may reach another request."""
    tenants = [provider.connect(f"tenant{number}") for number in range(3)]
    expected = {
        count: (rows := ring_rows(count), provider.served_model.compute(CALL, rows)) for count in (0, 1, 9, 300)
    }

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
    """A stream on which nothing happens uses no processor time. Neither does one with half a request, nor one that
    ended with an error while its tenant stays connected."""
    idle, over, raw = connect(provider, "idle"), connect(provider, "over"), RawTls(provider, "half")
    half = raw.connection
    for one in (idle, half, over):
        say(one, frame.hello(FrameType.HELLO))
        assert hear(one).kind is FrameType.WELCOME
    size = COLS * 4  # this request is never completed
    say(half, Header(FrameType.REQUEST, 1, CALL, 1, COLS, 0, size, 60_000).pack() + b"\0" * 4)
    raw.send(struct.pack("<I", 1000))
    say(over, b"\xff" * 100)
    assert hear(over).kind is FrameType.ERROR
    began = time.process_time()
    threading.Event().wait(1.0)
    assert time.process_time() - began < 0.3
    for one in (idle, half, over):
        one.release()
    assert_nothing_left(provider)
