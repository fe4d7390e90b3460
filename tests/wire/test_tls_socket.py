"""Messages over one TLS connection: whole, in order, and however they are cut; ends, floods and who is let in."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from provider.identity.authority import StateDir, issue_server_certificate
from provider.identity.registry import enroll
from provider.net.server import server_options
from tests.support.waiting import WAIT_S
from wire.errors import ForkedConnection, MalformedFrame
from wire.limits import MAX_FRAME_BYTES
from wire.transport import tls_socket
from wire.transport.grpc_connection import channel_options
from wire.transport.identity import TlsIdentity
from wire.transport.tls_context import ALPN, client_context, server_context
from wire.transport.tls_socket import MessageSocket, _leave_pacing, handshake

HOST = "127.0.0.1"
SIZES = [0, 1, (1 << 14) - 4, (1 << 14) - 1, 1 << 14, (1 << 14) + 1, 1 << 18, MAX_FRAME_BYTES]
LENGTH = struct.Struct("<I")


@dataclass
class Authority:
    """A CA with a provider's certificate and a tenant's."""

    server: tuple[bytes, bytes, bytes]
    client: tuple[bytes, bytes, bytes]

    def server_context(self) -> ssl.SSLContext:
        return server_context(*self.server)

    def client_context(self) -> ssl.SSLContext:
        return client_context(*self.client)


def make_authority(folder: Path) -> Authority:
    state = StateDir(folder / "state")
    key, chain, ca = issue_server_certificate(state, HOST)
    enroll(state, "acme", folder / "acme", f"grpcs://{HOST}:1")
    tenant = TlsIdentity.read(folder / "acme")
    return Authority((ca, chain, key), (tenant.ca_pem, tenant.cert_pem, tenant.key_pem))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("tls"))


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server((HOST, 0)) as listener:
        near = socket.create_connection(listener.getsockname(), WAIT_S)
        far, _ = listener.accept()
    return near, far


Outcome = MessageSocket | BaseException


def meet(client: ssl.SSLContext, server: ssl.SSLContext, name: str = HOST) -> tuple[Outcome, Outcome]:
    """Both ends after their handshakes, or what became of them."""
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


def joined(authority: Authority) -> tuple[MessageSocket, MessageSocket]:
    near, far = meet(authority.client_context(), authority.server_context())
    assert isinstance(near, MessageSocket)
    assert isinstance(far, MessageSocket)
    return near, far


@pytest.fixture
def ends(authority: Authority) -> Iterator[tuple[MessageSocket, MessageSocket]]:
    near, far = joined(authority)
    yield near, far
    near.release()
    far.release()


def receive(end: MessageSocket) -> bytes:
    while (message := end.next_message()) is None:
        try:
            end.wait()
        except EOFError:  # it may have come with the last message
            if (message := end.next_message()) is None:
                raise
            break
    return bytes(message)


def send_all(end: MessageSocket, *messages: bytes) -> None:
    for message in messages:
        end.send(message)
        while end.has_unsent:
            end.wait_to_send(0.1)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def joins(thread: threading.Thread) -> bool:
    thread.join(WAIT_S)
    return not thread.is_alive()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="not on this system")
def test_the_kernel_pings_at_both_ends(ends: tuple[MessageSocket, MessageSocket]) -> None:
    """After 20 s without a byte; some 10 s later the peer has vanished."""
    for end, unread_ms in zip(ends, (30_000, tls_socket.UNREAD_TIMEOUT_MS), strict=True):
        plain = end._plain
        assert plain.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, interval, count, unread = (
            plain.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
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


@pytest.mark.parametrize("size", SIZES)
def test_a_message_arrives_as_it_was_both_ways(ends: tuple[MessageSocket, MessageSocket], size: int) -> None:
    message = os.urandom(size)
    for source, sink in (ends, ends[::-1]):
        sender = in_thread(lambda source=source: send_all(source, message, b"after"))
        assert receive(sink) == message
        assert receive(sink) == b"after"
        assert joins(sender)


def test_many_small_messages_in_one_record(ends: tuple[MessageSocket, MessageSocket]) -> None:
    near, far = ends
    messages = [bytes([number % 256]) * (number % 7) for number in range(2000)]
    near._tls.write(b"".join(LENGTH.pack(len(one)) + one for one in messages))
    near._plain.sendall(near._outgoing.read())
    assert [receive(far) for _ in messages] == messages


@pytest.mark.parametrize("size", [0, 1, 9])
def test_a_message_cut_at_every_byte(ends: tuple[MessageSocket, MessageSocket], size: int) -> None:
    """By records: the length, too, may come in parts."""
    near, far = ends
    message = os.urandom(size)
    plain = 2 * (LENGTH.pack(size) + message)
    for cut in range(len(plain) + 1):
        for part in (plain[:cut], plain[cut:]):
            if part:
                near._tls.write(part)
        near._plain.sendall(near._outgoing.read())
        assert [receive(far), receive(far)] == [message, message]


def test_a_record_cut_at_every_byte(ends: tuple[MessageSocket, MessageSocket]) -> None:
    """By TCP: nothing is taken for a message until its record is whole."""
    near, far = ends
    for cut in range(1, 40):
        near._unsent.append(b"whole")
        cipher = bytes(near._encrypt())
        near._plain.sendall(cipher[:cut])
        if cut < len(cipher):
            assert far._poll(select.POLLIN, WAIT_S)
            far.receive()
            assert far.next_message() is None
        near._plain.sendall(cipher[cut:])
        assert receive(far) == b"whole"


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    messages=st.lists(st.one_of(st.binary(max_size=64), st.integers(0, 70_000).map(os.urandom)), max_size=12),
    cuts=st.lists(st.integers(1, 40_000), min_size=1, max_size=8),
)
def test_any_messages_in_any_pieces(authority: Authority, messages: list[bytes], cuts: list[int]) -> None:
    near, far = joined(authority)
    stream = b"".join(LENGTH.pack(len(one)) + one for one in messages)

    def pour() -> None:
        at = turn = 0
        while at < len(stream):
            near._tls.write(stream[at : at + cuts[turn % len(cuts)]])
            near._plain.sendall(near._outgoing.read())
            at += cuts[turn % len(cuts)]
            turn += 1
        near.end_sending()

    thread = in_thread(pour)
    assert [receive(far) for _ in messages] == messages
    with pytest.raises(EOFError):
        receive(far)
    assert joins(thread)
    near.release()
    far.release()


# ---- lengths --------------------------------------------------------------------------------------------------------


def test_a_length_above_the_limit_takes_no_memory(
    ends: tuple[MessageSocket, MessageSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = ends
    monkeypatch.setattr(tls_socket, "unwritten", lambda _size: pytest.fail("memory was taken"))
    near._tls.write(LENGTH.pack(2) + b"ok" + LENGTH.pack(MAX_FRAME_BYTES + 1) + b"rest")
    near._plain.sendall(near._outgoing.read())
    with pytest.raises(MalformedFrame, match=str(MAX_FRAME_BYTES)):
        far.wait()
    assert far.next_message() == b"ok"
    assert far.next_message() is None
    with pytest.raises(MalformedFrame):  # and it stays so: what follows is nobody's message
        far.wait()
    assert far.next_message() is None


# ---- ends -----------------------------------------------------------------------------------------------------------


def test_a_peer_that_ends_in_order(ends: tuple[MessageSocket, MessageSocket]) -> None:
    near, far = ends
    send_all(near, b"last")
    near.end_sending()
    assert receive(far) == b"last"
    for _ in range(2):
        with pytest.raises(EOFError):
            receive(far)
    send_all(far, b"the other way is open")
    assert receive(near) == b"the other way is open"


def test_a_peer_that_ends_without_a_word(ends: tuple[MessageSocket, MessageSocket]) -> None:
    near, far = ends
    send_all(near, b"last")
    near.release()
    assert receive(far) == b"last"
    with pytest.raises(ConnectionError):
        receive(far)


def test_an_end_in_the_middle_of_a_message_is_no_message(ends: tuple[MessageSocket, MessageSocket]) -> None:
    near, far = ends
    near._tls.write(LENGTH.pack(100) + b"half")
    near._plain.sendall(near._outgoing.read())
    near.end_sending()
    with pytest.raises(EOFError):
        receive(far)
    assert far.next_message() is None


def last_flight(authority: Authority, *more: bytes, is_end: bool = False) -> MessageSocket:
    """A provider's end whose tenant sent the end of its handshake and `more` in one piece."""
    near, far = tcp_pair()
    made: list[MessageSocket] = []
    thread = in_thread(lambda: made.append(handshake(far, authority.server_context())))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = authority.client_context().wrap_bio(incoming, outgoing, server_hostname=HOST)
    while True:
        with contextlib.suppress(ssl.SSLWantReadError):
            tls.do_handshake()
            break
        near.sendall(outgoing.read())
        incoming.write(near.recv(1 << 16))
    for one in more:
        tls.write(one)
    if is_end:
        with contextlib.suppress(ssl.SSLWantReadError):
            tls.unwrap()
    near.sendall(outgoing.read())
    near.shutdown(socket.SHUT_WR)
    assert joins(thread)
    near.close()
    return made[0]


def test_messages_and_an_end_beside_the_handshake_are_taken(authority: Authority) -> None:
    end = last_flight(authority, LENGTH.pack(5) + b"hello", is_end=True)
    assert receive(end) == b"hello"
    with pytest.raises(EOFError):
        receive(end)
    end.release()


def test_a_wrong_length_beside_the_handshake_comes_after_what_was_right(authority: Authority) -> None:
    end = last_flight(authority, LENGTH.pack(5) + b"hello" + b"\xff" * 4)
    assert receive(end) == b"hello"
    with pytest.raises(MalformedFrame):
        receive(end)
    end.release()


def test_close_wakes_who_receives(ends: tuple[MessageSocket, MessageSocket]) -> None:
    near, _ = ends
    ended: list[BaseException] = []

    def read() -> None:
        try:
            receive(near)
        except OSError as exc:
            ended.append(exc)

    reader = in_thread(read)
    near.close()
    near.close()
    assert joins(reader)
    assert isinstance(ended[0], ConnectionError)
    for use in (lambda: near.send(b"late"), near.wait, near.flush, lambda: near.wait_to_send(0.1)):
        with pytest.raises(ConnectionError):
            use()
    near.release()
    near.release()
    near.close()


def test_a_closed_socket_is_not_shut_down_by_its_number(ends: tuple[MessageSocket, MessageSocket]) -> None:
    """The number may be another connection's by then; `close` may come from any thread."""
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_neither_sends_nor_ends_its_parents_connection(ends: tuple[MessageSocket, MessageSocket]) -> None:
    """Both would count on with the same keys."""
    near, far = ends
    child = os.fork()
    if child == 0:  # nothing of pytest may run here
        refused = 0
        for use in (lambda: near.send(b"child's"), near.wait, near.end_sending):
            with contextlib.suppress(ForkedConnection):
                use()
                os._exit(1)
            refused += 1
        near.close()
        near.release()
        os._exit(0 if refused == 3 else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    send_all(near, b"parent's")
    assert receive(far) == b"parent's"


# ---- many threads, slow peers ---------------------------------------------------------------------------------------


def test_sending_goes_on_while_another_thread_waits_for_messages(ends: tuple[MessageSocket, MessageSocket]) -> None:
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


def test_messages_of_several_threads_stay_whole(ends: tuple[MessageSocket, MessageSocket]) -> None:
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


def test_a_peer_that_does_not_read_holds_up_nobody(ends: tuple[MessageSocket, MessageSocket]) -> None:
    near, far = ends
    message = os.urandom(1 << 20)
    began = time.monotonic()
    count = 0
    while not near.has_unsent:
        near.send(message)
        count += 1
    near.send(message)
    near.wait_to_send(0.05)
    assert time.monotonic() - began < WAIT_S / 2
    assert near.has_unsent
    got = [receive(far)]

    def read() -> None:
        while len(got) < count + 1:
            got.append(receive(far))

    reader = in_thread(read)
    while near.has_unsent:
        near.wait_to_send(WAIT_S)
    assert joins(reader)
    assert all(one == message for one in got)


def test_two_floods_against_each_other_end(ends: tuple[MessageSocket, MessageSocket]) -> None:
    """One thread an end, which sends and receives: nobody may wait for the peer to read first."""
    message, count = os.urandom(1 << 20), 24

    def both(end: MessageSocket, got: list[bytes]) -> None:
        for _ in range(count):
            end.send(message)
        while len(got) < count or end.has_unsent:
            end.wait()
            while (one := end.next_message()) is not None:
                got.append(bytes(one))

    received: tuple[list[bytes], list[bytes]] = ([], [])
    threads = [in_thread(lambda k=k: both(ends[k], received[k])) for k in (0, 1)]
    # Who has all may wait for a message that nobody sends: the other one's end wakes it.
    give_up_at = time.monotonic() + 2 * WAIT_S
    while any(len(got) < count for got in received) and time.monotonic() < give_up_at:
        threading.Event().wait(0.01)
    assert [len(got) for got in received] == [count, count]
    assert all(one == message for got in received for one in got)
    for end in ends:
        end.close()
    assert all(joins(thread) for thread in threads)


def test_what_has_been_sent_is_freed(ends: tuple[MessageSocket, MessageSocket]) -> None:
    near, far = ends
    reader = in_thread(lambda: receive(far))
    send_all(near, bytes(1 << 20))
    assert joins(reader)
    assert near._cipher.obj == b""


# ---- who is let in --------------------------------------------------------------------------------------------------


def refused(near: Outcome, far: Outcome) -> bool:
    """Whether neither end, or in TLS 1.3 at most the tenant's, which learns of it when it reads, has a connection."""
    if isinstance(near, MessageSocket):
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


def test_nothing_is_resumed(ends: tuple[MessageSocket, MessageSocket]) -> None:
    near, far = ends
    send_all(far, b"a ticket would come before this")
    receive(near)
    assert near._tls.session is None or not near._tls.session.has_ticket


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
    monkeypatch.setattr(tls_socket, "HANDSHAKE_TIMEOUT_S", 0.2)
    assert isinstance(slow_handshake(authority, lambda _near, thread: thread.join(WAIT_S)), TimeoutError)


def test_a_byte_now_and_then_gives_no_more_time(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the deadline nothing is read, though something has come."""
    monkeypatch.setattr(tls_socket, "HANDSHAKE_TIMEOUT_S", 0.0)
    near, far = tcp_pair()
    near.sendall(b"\x16")
    with pytest.raises(TimeoutError):
        handshake(far, authority.server_context())
    assert far.fileno() == -1
    near.close()


@pytest.mark.parametrize("what", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\0" * 100, b"\xff" * 70_000])
def test_what_is_no_tls_is_refused(authority: Authority, what: bytes) -> None:
    assert isinstance(slow_handshake(authority, lambda near, _thread: near.sendall(what)), OSError)


def test_answers_that_pile_up_end_the_connection(
    ends: tuple[MessageSocket, MessageSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer may ask for new keys as often as it likes, and each time OpenSSL writes an answer that nobody fetches."""
    near, far = ends
    monkeypatch.setattr(tls_socket, "_ANSWER_BYTES", 100)
    far._outgoing.write(b"\0" * 99)
    send_all(near, b"one")
    assert receive(far) == b"one"
    far._outgoing.write(b"\0" * 2)
    send_all(near, b"two")
    with pytest.raises(ConnectionError, match="new keys"):
        far.wait()


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
    near, far = joined(authority)
    assert not list(tmp_path.iterdir())
    near.release()
    far.release()


def test_a_tenant_that_computes_is_not_taken_for_one_that_is_gone(ends: tuple[MessageSocket, MessageSocket]) -> None:
    """Linux ends a connection whose peer answers but does not read for so long."""
    near, far = (end._plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for end in ends)
    assert near == 30_000
    assert far == 300_000


def test_nothing_is_paced_on_the_way_to_this_machine(ends: tuple[MessageSocket, MessageSocket]) -> None:
    chosen = [end._plain.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16) for end in ends]
    assert [name.rstrip(b"\0") for name in chosen] == [b"reno", b"reno"]


@pytest.mark.parametrize(
    ("peer", "is_near"),
    [("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("10.0.0.1", False), ("2001:db8::1", False)],
)
def test_only_a_peer_on_this_machine_changes_the_congestion_control(peer: str, is_near: bool) -> None:
    chosen: list[object] = []
    plain: Any = SimpleNamespace(getpeername=lambda: (peer, 1), setsockopt=lambda *given: chosen.append(given[-1]))
    _leave_pacing(plain)
    assert chosen == ([b"reno"] if is_near else [])
