"""Tests the handshake on a Unix socket: only a peer that completes it may go on without encryption."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable

import pytest

from tests.support.identities import HOST, Authority, make_authority
from tests.support.raw_peers import RawPeer, receive
from tests.support.waiting import WAIT_S
from wire.errors import ConfigurationError, MalformedFrame, WrongPeer
from wire.transport.ipc import handshake as module
from wire.transport.ipc.clear_socket import ClearSocket
from wire.transport.ipc.handshake import STATEMENT_BYTES, Credentials, provider_handshake, tenant_handshake
from wire.transport.tls import ALPN, IPC_ALPN, client_context, handshake, server_context

Outcome = ClearSocket | BaseException
FRAME = struct.pack("<I", 4) + b"VEIL"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("ipc"))


@pytest.fixture
def tenant(authority: Authority) -> ssl.SSLContext:
    return client_context(*authority.client, IPC_ALPN)


@pytest.fixture
def provider(authority: Authority) -> ssl.SSLContext:
    return server_context(*authority.server, IPC_ALPN)


def outcome_of(work: Callable[[], ClearSocket]) -> Outcome:
    try:
        return work()
    except BaseException as exc:  # noqa: BLE001 - given to the test
        return exc


def meet(one: Callable[[], ClearSocket], other: Callable[[], ClearSocket]) -> tuple[Outcome, Outcome]:
    """Runs a handshake's two ends, one of them in another thread, and returns the outcome of each."""
    found: list[Outcome] = []
    thread = threading.Thread(target=lambda: found.append(outcome_of(other)), daemon=True)
    thread.start()
    mine = outcome_of(one)
    thread.join(WAIT_S)
    return mine, found[0]


def test_both_ends_go_on_without_encryption(tenant: ssl.SSLContext, provider: ssl.SSLContext) -> None:
    near, far = socket.socketpair()
    mine, theirs = meet(lambda: tenant_handshake(near, tenant), lambda: provider_handshake(far, provider))
    assert isinstance(mine, ClearSocket)
    assert isinstance(theirs, ClearSocket)
    for source, sink in ((mine, theirs), (theirs, mine)):
        source.send(b"hello")
        assert receive(sink) == b"hello"
    assert b"veilbase://tenant/acme" in theirs.peer_certificate()
    mine.release()
    theirs.release()


# ---- who is at the other end ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("difference", [Credentials(-1, 0), Credentials(0, -1)], ids=["pid", "uid"])
@pytest.mark.parametrize("end", ["tenant", "provider"])
def test_another_process_than_stated_ends_the_connection_at_both_ends(
    tenant: ssl.SSLContext,
    provider: ssl.SSLContext,
    monkeypatch: pytest.MonkeyPatch,
    difference: Credentials,
    end: str,
) -> None:
    """At one end, the kernel reports other process or user ids than the peer states, as if a relay stood between the
    two. Both ends then raise an error and close."""
    near, far = socket.socketpair()
    seen = module.of_peer(near)
    relay = Credentials(abs(seen.pid + difference.pid), (seen.uid + difference.uid) % (1 << 32))
    fooled = near if end == "tenant" else far
    monkeypatch.setattr(module, "of_peer", lambda plain: relay if plain is fooled else seen)
    found = meet(lambda: tenant_handshake(near, tenant), lambda: provider_handshake(far, provider))
    assert [type(one) for one in found] == [WrongPeer, WrongPeer]
    assert near.fileno() == far.fileno() == -1  # closed


def test_a_statement_that_is_none_is_refused(tenant: ssl.SSLContext, provider: ssl.SSLContext) -> None:
    near, far = socket.socketpair()
    peer = RawPeer(near, tenant, "localhost")

    def lie() -> ClearSocket:
        peer.shake_hands()
        peer.send(bytes(STATEMENT_BYTES))
        raise ConnectionError(peer.receive(STATEMENT_BYTES + 1))

    lied, theirs = meet(lie, lambda: provider_handshake(far, provider))
    assert isinstance(theirs, MalformedFrame)
    assert isinstance(lied, ConnectionError)  # and no `clear` came
    near.close()


@pytest.mark.parametrize("is_told", [True, False], ids=["no name", "no answer"])
def test_a_system_that_does_not_say_who_is_there_is_refused(
    tenant: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    near, far = socket.socketpair()
    if is_told:
        monkeypatch.delattr(socket, "SO_PEERCRED")
    else:
        monkeypatch.setattr(socket, "SO_PEERCRED", 0x7FFF)
    with pytest.raises(ConfigurationError):
        tenant_handshake(near, tenant)
    assert far.recv(1) == b""  # nothing was sent
    far.close()


def test_no_certificate_is_refused(authority: Authority, provider: ssl.SSLContext) -> None:
    context = ssl.create_default_context(cadata=authority.client[0].decode())
    context.set_alpn_protocols([IPC_ALPN])
    near, far = socket.socketpair()
    mine, theirs = meet(lambda: tenant_handshake(near, context), lambda: provider_handshake(far, provider))
    assert isinstance(mine, OSError)
    assert isinstance(theirs, ssl.SSLError)


def test_a_silent_peer_has_until_the_deadline(provider: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT_S", 0.05)
    near, far = socket.socketpair()
    with pytest.raises(TimeoutError):
        provider_handshake(far, provider)
    near.close()


# ---- when encryption ends -------------------------------------------------------------------------------------------


def raw_tenant(plain: socket.socket, context: ssl.SSLContext) -> RawPeer:
    """Returns a tenant that has sent and checked the statements of process and user ids, but has not sent `clear`
    yet."""
    peer = RawPeer(plain, context, "localhost")
    mine, seen = module.own(), module.of_peer(plain)
    peer.shake_hands()
    peer.send(module.statement(mine, seen))
    module.check_statement(peer.receive(STATEMENT_BYTES), mine, seen)
    return peer


@pytest.mark.parametrize("behind", ["in TLS", "in the clear"])
def test_what_comes_behind_clear_before_the_answer_counts_as_nothing(
    tenant: ssl.SSLContext, provider: ssl.SSLContext, behind: str
) -> None:
    near, far = socket.socketpair()

    def hurry() -> ClearSocket:
        peer = raw_tenant(near, tenant)
        last = peer.records(b"clear", *([FRAME] if behind == "in TLS" else []))
        near.sendall(last + (FRAME if behind == "in the clear" else b""))
        raise ConnectionError(peer.receive(1))

    mine, theirs = meet(hurry, lambda: provider_handshake(far, provider))
    assert isinstance(theirs, MalformedFrame)
    assert isinstance(mine, ConnectionError)
    assert far.fileno() == -1
    near.close()


def test_another_word_than_clear_is_refused(tenant: ssl.SSLContext, provider: ssl.SSLContext) -> None:
    near, far = socket.socketpair()

    def say_another() -> ClearSocket:
        raw_tenant(near, tenant).send(b"cloud")
        raise ConnectionError

    _, theirs = meet(say_another, lambda: provider_handshake(far, provider))
    assert isinstance(theirs, MalformedFrame)
    near.close()


# ---- TCP stays encrypted --------------------------------------------------------------------------------------------


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server((HOST, 0)) as listener:
        near = socket.create_connection(listener.getsockname(), WAIT_S)
        far, _ = listener.accept()
    return near, far


def test_an_end_does_not_do_this_handshake_over_tcp(tenant: ssl.SSLContext, provider: ssl.SSLContext) -> None:
    for begin in (lambda end: tenant_handshake(end, tenant), lambda end: provider_handshake(end, provider)):
        near, far = tcp_pair()
        with pytest.raises(ConfigurationError, match="AF_UNIX"):
            begin(near)
        assert far.recv(1) == b""  # nothing was sent
        far.close()


@pytest.mark.parametrize(("asked", "spoken"), [(IPC_ALPN, ALPN), (ALPN, IPC_ALPN)])
def test_neither_port_speaks_the_others_protocol(authority: Authority, asked: str, spoken: str) -> None:
    """A tenant that reaches the socket instead of the TCP port, or the port instead of the socket, notices this in the
    handshake, before any frame is sent."""
    near, far = tcp_pair() if spoken == ALPN else socket.socketpair()
    context = server_context(*authority.server, spoken)

    def answer() -> ClearSocket:
        if spoken == IPC_ALPN:
            return provider_handshake(far, context)
        handshake(far, context)
        raise AssertionError("the handshake was done")

    def ask() -> ClearSocket:
        peer = RawPeer(near, client_context(*authority.client, asked), "localhost")
        with contextlib.suppress(ssl.SSLError):  # OpenSSL may refuse, or agree on nothing
            peer.shake_hands()
            peer.send(b"clear")
        raise ConnectionError(peer.receive(1))

    mine, theirs = meet(ask, answer)
    assert isinstance(theirs, ssl.SSLError)
    assert isinstance(mine, OSError)
    near.close()
