"""Tests what is special about messages over TLS: records, pings, ends, keys, and which peers are admitted.
tests/wire/test_message_socket.py tests what they have in common with messages that are not encrypted."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provider.net.server import server_options
from tests.support.identities import HOST, Authority, make_authority
from tests.support.raw_peers import RawPeer, raw_tenant, receive, send_all, tcp_pair, tls_ends
from tests.support.threads import in_thread
from tests.support.waiting import WAIT_S
from wire.errors import MalformedFrame
from wire.transport import tls
from wire.transport.grpc_channel import channel_options
from wire.transport.tls import ALPN, TlsSocket, client_context, handshake, server_context

LENGTH = struct.Struct("<I")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("tls"))


Outcome = TlsSocket | BaseException


def meet(client: ssl.SSLContext, server: ssl.SSLContext, name: str = HOST) -> tuple[Outcome, Outcome]:
    """Returns both ends after their handshakes, or the errors with which they failed."""
    near, far = tcp_pair()
    outcome: list[Outcome] = []

    def accept() -> None:
        try:
            outcome.append(handshake(far, server))
        except BaseException as exc:  # noqa: BLE001 - given to the test
            outcome.append(exc)

    thread = threading.Thread(target=accept)
    thread.start()
    mine: Outcome
    try:
        mine = handshake(near, client, name)
    except OSError as exc:
        mine = exc
    thread.join(WAIT_S)
    return mine, outcome[0]


@pytest.fixture
def ends(authority: Authority) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    near, far = tls_ends(authority)
    yield near, far
    near.release()
    far.release()


@pytest.fixture
def raw(authority: Authority) -> Iterator[tuple[RawPeer, TlsSocket]]:
    near, far = raw_tenant(authority)
    yield near, far
    near.plain.close()
    far.release()


def option(end: TlsSocket, level: int, name: int, *size: int) -> Any:
    """Returns an option of the socket of one end."""
    with socket.socket(fileno=os.dup(end.fileno())) as plain:
        return plain.getsockopt(level, name, *size)


def joins(thread: threading.Thread) -> bool:
    thread.join(WAIT_S)
    return not thread.is_alive()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="not on this system")
def test_the_kernel_pings_at_both_ends(ends: tuple[TlsSocket, TlsSocket]) -> None:
    """Pings begin after 20 s without a byte. Some 10 s later a peer that does not respond counts as lost."""
    for end, unread_ms in zip(ends, (30_000, tls.UNREAD_TIMEOUT_MS), strict=True):
        assert option(end, socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, interval, count, unread = (
            option(end, socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        )
        assert idle == 20
        assert 5 <= interval * count <= 10
        assert unread == unread_ms


def test_grpc_pings_from_both_ends() -> None:
    tenant, provider = dict(channel_options("provider.example")), dict(server_options())
    for options in (tenant, provider):
        assert options["grpc.keepalive_time_ms"] == 20_000
        assert options["grpc.keepalive_timeout_ms"] == 10_000
        assert options["grpc.keepalive_permit_without_calls"] == 1
    assert provider["grpc.http2.min_recv_ping_interval_without_data_ms"] < tenant["grpc.keepalive_time_ms"]


# ---- messages -------------------------------------------------------------------------------------------------------


def test_a_record_cut_at_every_byte(raw: tuple[RawPeer, TlsSocket]) -> None:
    """The record is cut into TCP segments. Nothing counts as a message before its record is complete."""
    near, far = raw
    for cut in range(1, 40):
        cipher = near.records(LENGTH.pack(5) + b"whole")
        near.plain.sendall(cipher[:cut])
        if cut < len(cipher):
            assert select.select([far.fileno()], [], [], WAIT_S)[0]
            far.receive()
            assert far.next_message() is None
        near.plain.sendall(cipher[cut:])
        assert receive(far) == b"whole"


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    messages=st.lists(st.one_of(st.binary(max_size=64), st.integers(0, 70_000).map(os.urandom)), max_size=12),
    cuts=st.lists(st.integers(1, 40_000), min_size=1, max_size=8),
)
def test_any_messages_in_any_pieces(authority: Authority, messages: list[bytes], cuts: list[int]) -> None:
    near, far = raw_tenant(authority)
    stream = b"".join(LENGTH.pack(len(one)) + one for one in messages)

    def pour() -> None:
        at = turn = 0
        while at < len(stream):
            near.send(stream[at : at + cuts[turn % len(cuts)]])
            at += cuts[turn % len(cuts)]
            turn += 1
        near.end()
        near.send()

    thread = in_thread(pour)
    assert [receive(far) for _ in messages] == messages
    with pytest.raises(EOFError):
        receive(far)
    assert joins(thread)
    near.plain.close()
    far.release()


# ---- ends -----------------------------------------------------------------------------------------------------------


def test_an_end_in_the_middle_of_a_message_is_no_message(raw: tuple[RawPeer, TlsSocket]) -> None:
    near, far = raw
    near.send(LENGTH.pack(100) + b"half")
    near.end()
    near.send()
    with pytest.raises(EOFError):
        receive(far)
    assert far.next_message() is None


def test_messages_and_an_end_beside_the_handshake_are_taken(authority: Authority) -> None:
    near, end = raw_tenant(authority, LENGTH.pack(5) + b"hello", is_end=True)
    near.plain.close()
    assert receive(end) == b"hello"
    with pytest.raises(EOFError):
        receive(end)
    end.release()


def test_a_wrong_length_beside_the_handshake_comes_after_what_was_right(authority: Authority) -> None:
    near, end = raw_tenant(authority, LENGTH.pack(5) + b"hello" + b"\xff" * 4)
    near.plain.close()
    assert receive(end) == b"hello"
    with pytest.raises(MalformedFrame):
        receive(end)
    end.release()


def test_a_closed_socket_is_not_shut_down_by_its_number(ends: tuple[TlsSocket, TlsSocket]) -> None:
    """After a socket is closed, nothing is done with its descriptor number, since another connection may have this
    number by then. Any thread may call `close`."""
    near, _ = ends
    number = near.fileno()
    near.release()
    one, other = socket.socketpair()
    taken = one.fileno() == number or other.fileno() == number
    closers = [in_thread(near.close) for _ in range(8)]
    assert all(joins(thread) for thread in closers)
    one.sendall(b"alive")
    assert other.recv(8) == b"alive"
    one.close()
    other.close()
    assert taken


# ---- many threads, slow peers ---------------------------------------------------------------------------------------


def test_sending_goes_on_while_another_thread_waits_for_messages(ends: tuple[TlsSocket, TlsSocket]) -> None:
    near, far = ends
    got: list[bytes] = []
    reader = in_thread(lambda: got.append(receive(near)))
    for number in range(100):
        send_all(near, b"%d" % number)
    assert [receive(far) for _ in range(100)] == [b"%d" % number for number in range(100)]
    assert not got
    send_all(far, b"answer")
    assert joins(reader)
    assert got == [b"answer"]


def test_messages_of_several_threads_stay_whole(ends: tuple[TlsSocket, TlsSocket]) -> None:
    near, far = ends
    senders = [
        in_thread(lambda mark=mark: send_all(near, *[bytes([mark]) * (1 + 3571 * n) for n in range(30)]))
        for mark in range(4)
    ]
    seen: dict[int, list[int]] = {mark: [] for mark in range(4)}
    for _ in range(120):
        message = receive(far)
        assert len(set(message)) == 1
        seen[message[0]].append(len(message))
    assert all(sizes == [1 + 3571 * n for n in range(30)] for sizes in seen.values())
    assert all(joins(thread) for thread in senders)


class Message(bytearray):
    """Holds bytes to which weak references can be made."""


def test_what_has_been_sent_is_freed(ends: tuple[TlsSocket, TlsSocket]) -> None:
    """After a message is sent, both it and its encrypted bytes are freed. A first message is not measured, since it
    allocates memory that the connection keeps."""
    near, far = ends

    def send(num_bytes: int) -> weakref.ref[Message]:
        message = Message(num_bytes)
        reader = in_thread(lambda: receive(far))
        near.send(memoryview(message))
        while near.has_unsent:
            near.wait_to_send(0.1)
        assert joins(reader)
        return weakref.ref(message)

    tracemalloc.start()
    try:
        send(1 << 20)
        send(1)
        before, _ = tracemalloc.get_traced_memory()
        sent = send(1 << 20)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sent() is None
    assert after - before < 1 << 14


# ---- who is let in --------------------------------------------------------------------------------------------------


def refused(near: Outcome, far: Outcome) -> bool:
    """Returns whether no end has a connection. With TLS 1.3 the tenant may have one for a while, since it learns of the
    refusal only when it reads."""
    if isinstance(near, TlsSocket):
        with pytest.raises(OSError):
            receive(near)
        near.release()
    return isinstance(far, OSError)


def other_context(authority: Authority, change: Callable[[ssl.SSLContext], object]) -> ssl.SSLContext:
    context = authority.client_context()
    change(context)
    return context


def use_tls_1_2(context: ssl.SSLContext) -> None:
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    "change",
    [use_tls_1_2, lambda context: context.set_alpn_protocols(["h2"]), lambda context: context.set_alpn_protocols([])],
)
def test_another_protocol_is_refused(authority: Authority, change: Callable[[ssl.SSLContext], object]) -> None:
    assert refused(*meet(other_context(authority, change), authority.server_context()))


def test_no_certificate_is_refused(authority: Authority) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols([ALPN])
    context.load_verify_locations(cadata=authority.client[0].decode())
    assert refused(*meet(context, authority.server_context()))


def test_a_tenant_of_another_ca_is_refused(authority: Authority, tmp_path: Path) -> None:
    _, cert, key = make_authority(tmp_path).client
    assert refused(*meet(client_context(authority.client[0], cert, key), authority.server_context()))


def test_a_provider_of_another_ca_is_refused(authority: Authority, tmp_path: Path) -> None:
    near, far = meet(authority.client_context(), make_authority(tmp_path).server_context())
    assert isinstance(near, ssl.SSLCertVerificationError)
    assert isinstance(far, OSError)


def test_a_wrong_host_is_refused(authority: Authority) -> None:
    near, far = meet(authority.client_context(), authority.server_context(), "other.example")
    assert isinstance(near, ssl.SSLCertVerificationError)
    assert isinstance(far, OSError)


def test_a_tenant_cannot_pose_as_the_provider(authority: Authority) -> None:
    near, far = meet(authority.client_context(), server_context(*authority.client))
    assert isinstance(near, ssl.SSLCertVerificationError)
    assert isinstance(far, OSError)


def test_the_providers_certificate_does_not_make_a_tenant(authority: Authority) -> None:
    assert refused(*meet(client_context(*authority.server), authority.server_context()))


def test_nothing_is_resumed(raw: tuple[RawPeer, TlsSocket]) -> None:
    near, far = raw
    message = b"a ticket would come before this"
    send_all(far, message)
    assert near.receive(4 + len(message)) == LENGTH.pack(len(message)) + message
    assert near.tls.session is None or not near.tls.session.has_ticket


# ---- the handshake's time, new keys, the key's file -----------------------------------------------------------------


def slow_handshake(authority: Authority, feed: Callable[[socket.socket, threading.Thread], None]) -> BaseException:
    near, far = tcp_pair()
    ended: list[BaseException] = []

    def accept() -> None:
        try:
            handshake(far, authority.server_context())
        except OSError as exc:
            ended.append(exc)

    thread = in_thread(accept)
    with contextlib.suppress(OSError):
        feed(near, thread)
    assert joins(thread)
    near.close()
    return ended[0]


def test_a_silent_peer_has_until_the_deadline(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "HANDSHAKE_TIMEOUT_S", 0.2)
    assert isinstance(slow_handshake(authority, lambda _near, thread: thread.join(WAIT_S)), TimeoutError)


def test_a_byte_now_and_then_gives_no_more_time(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handshake ends at its deadline, even if a few bytes have arrived."""
    monkeypatch.setattr(tls, "HANDSHAKE_TIMEOUT_S", 0.0)
    near, far = tcp_pair()
    near.sendall(b"\x16")
    with pytest.raises(TimeoutError):
        handshake(far, authority.server_context())
    assert far.fileno() == -1
    near.close()


@pytest.mark.parametrize("what", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\0" * 100, b"\xff" * 70_000])
def test_what_is_no_tls_is_refused(authority: Authority, what: bytes) -> None:
    assert isinstance(slow_handshake(authority, lambda near, _thread: near.sendall(what)), OSError)


def test_answers_that_pile_up_end_the_connection(authority: Authority) -> None:
    """A peer requests new keys again and again, and does not read the replies that OpenSSL writes. The connection ends
    before they take much memory."""
    near_plain, far_plain = tcp_pair()
    provider = RawPeer(far_plain, authority.server_context())
    made: list[TlsSocket] = []
    thread = in_thread(lambda: made.append(handshake(near_plain, authority.client_context(), HOST)))
    provider.shake_hands()
    provider.send()
    assert joins(thread)
    (near,) = made
    far = TlsSocket(far_plain, provider.tls, provider.incoming, provider.outgoing)
    provider.outgoing.write(bytes(1 << 16))
    send_all(near, b"one")
    assert receive(far) == b"one"
    provider.outgoing.write(bytes(1))
    send_all(near, b"two")
    with pytest.raises(ConnectionError, match="new keys"):
        far.wait()
    near.release()
    far.release()


def test_the_key_stays_in_no_file(authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = set(os.listdir("/proc/self/fd"))
    authority.client_context()
    authority.server_context()
    with pytest.raises(ssl.SSLError):
        client_context(authority.client[0], authority.client[1], b"no key")
    assert not list(tmp_path.iterdir())
    assert len(set(os.listdir("/proc/self/fd")) - before) == 0


def test_without_memory_files_the_key_is_gone_again(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    near, far = tls_ends(authority)
    assert not list(tmp_path.iterdir())
    near.release()
    far.release()


def test_a_tenant_that_computes_is_not_taken_for_one_that_is_gone(ends: tuple[TlsSocket, TlsSocket]) -> None:
    """Linux ends a connection whose peer does not read for TCP_USER_TIMEOUT. The tenant sets 30 s, and the provider 300
    s, since a tenant may compute for minutes before it reads."""
    near, far = (option(end, socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for end in ends)
    assert near == 30_000
    assert far == 300_000


def test_nothing_is_paced_on_the_way_to_this_machine(ends: tuple[TlsSocket, TlsSocket]) -> None:
    chosen = [option(end, socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16) for end in ends]
    assert [name.rstrip(b"\0") for name in chosen] == [b"reno", b"reno"]


@pytest.mark.parametrize(
    ("peer", "is_near"),
    [("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("10.0.0.1", False), ("2001:db8::1", False)],
)
def test_only_a_peer_on_this_machine_changes_the_congestion_control(
    authority: Authority, peer: str, is_near: bool
) -> None:
    options: list[tuple[int, int, object]] = []

    def refuse(data: bytes) -> None:
        raise ConnectionError("this connection is none")

    plain: Any = SimpleNamespace(
        getpeername=lambda: (peer, 1), setsockopt=lambda *given: options.append(given), settimeout=float,
        sendall=refuse, close=lambda: None,
    )  # fmt: skip
    with pytest.raises(ConnectionError, match="is none"):
        handshake(plain, authority.client_context(), HOST)
    chosen = [value for _, name, value in options if name == socket.TCP_CONGESTION]
    assert chosen == ([b"reno"] if is_near else [])
