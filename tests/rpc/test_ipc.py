"""Tests tenants on the provider's own host, which connect by a socket: strangers, relays, other users, folders in bad
shape, and a host without TCP."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import provider.net.ports as port_module
from provider.identity.authority import StateDir
from provider.identity.registry import enroll, revoke
from provider.model.served_model import ServedModel
from provider.net import carrier as carrier_module
from provider.net.ports import IpcPort
from provider.net.server import Server
from tests.support.files import mode, umask_of
from tests.support.identities import expired_identity, foreign_identity, unregistered_identity
from tests.support.providers import Provider
from tests.support.raw_peers import RawStream, Relay, assert_ends, connect_ipc, dial_ipc, hear, port_of, say
from tests.support.ring_products import CALL, COLS, ask, assert_served, ring_rows
from tests.support.threads import in_child
from tests.support.waiting import WAIT_S, until
from wire import frame
from wire.errors import (
    ConfigurationError,
    ForkedConnection,
    MalformedFrame,
    NotPermitted,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
    VeilbaseError,
    WireCode,
    WrongPeer,
)
from wire.frame import FrameType, Header
from wire.transport import stream_connection, tls
from wire.transport.grpc_connection import GrpcConnection
from wire.transport.identity import TlsIdentity
from wire.transport.ipc.clear_socket import ClearSocket
from wire.transport.ipc.connection import IpcConnection
from wire.transport.ipc.fetch import fetch
from wire.transport.ipc.folder import SOCKET_NAME, folder_of
from wire.transport.tls import IPC_ALPN

IS_ROOT = os.geteuid() == 0
OTHER_UID = 65_534
NEW_NETWORK = 0x4000_0000
"""CLONE_NEWNET of linux/sched.h."""
root_only = pytest.mark.skipif(not IS_ROOT, reason="only root can become another user")
pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="this system has no SO_PEERCRED")


@pytest.fixture
def provider(start: Callable[..., Provider], tiny_served_model: ServedModel) -> Provider:
    return start(tiny_served_model, tensor_port=None, ipc=True)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the time for which a tenant tries to reach a provider that has too many connections."""
    monkeypatch.setattr("wire.transport.ipc.connection.CROWDED_S", 0.1)


def line_of(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    return text


# ---- the way it should be -------------------------------------------------------------------------------------------


def test_a_session_needs_no_tcp(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Manifest, bundle and tensor stream all arrive through the socket in the folder; any attempt to use TCP fails the
    test."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection by TCP was asked for")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr("grpc.secure_channel", refuse)
    connection = provider.connect()
    manifest = connection.manifest()
    assert manifest.groups == provider.served_model.manifest().groups
    for file in manifest.bundle:
        chunks = list(connection.fetch(file.name))
        assert sum(map(len, chunks)) == file.size_bytes
        assert b"".join(chunks) == b"".join(provider.served_model.read_file(file.name))
    assert_served(connection, provider.served_model)
    assert connection.carrier == "ipc"
    assert connection.traffic.bytes_down > sum(file.size_bytes for file in manifest.bundle)


def test_folder_and_socket_let_other_users_knock(tmp_path: Path) -> None:
    """Other users can connect, whatever the umask is, because certificates decide who is admitted."""
    with umask_of(0o077):
        port = IpcPort(tmp_path / "ipc")
    assert mode(tmp_path / "ipc") == 0o711
    assert mode(tmp_path / "ipc" / SOCKET_NAME) == 0o666
    assert mode(tmp_path / "ipc" / "veilbase.lock") == 0o600
    port.stop()
    port.stop()
    assert not (tmp_path / "ipc" / SOCKET_NAME).exists()
    (tmp_path / "own").mkdir(0o700)
    IpcPort(tmp_path / "own").stop()
    assert mode(tmp_path / "own") == 0o700  # the operator's own choice


def test_a_folder_is_one_providers_at_a_time(tmp_path: Path) -> None:
    first = IpcPort(tmp_path / "ipc")
    with pytest.raises(ConfigurationError, match="another provider serves in") as caught:
        IpcPort(tmp_path / "ipc")
    line_of(caught.value)
    assert (tmp_path / "ipc" / SOCKET_NAME).exists()
    first.stop()
    IpcPort(tmp_path / "ipc").stop()


def test_a_socket_that_was_left_is_replaced(
    start: Callable[..., Provider], tiny_served_model: ServedModel, tmp_path: Path
) -> None:
    (tmp_path / "ipc0").mkdir(0o711)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "ipc0" / SOCKET_NAME))
    running = start(tiny_served_model, tensor_port=None, ipc=True)
    assert_served(running.connect(), tiny_served_model)


@pytest.mark.parametrize("what", ["writable", "parent", "linked", "no parent", "a file", "no socket"])
def test_a_folder_that_no_tenant_would_take_is_refused_at_the_start(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "ipc"
    folder.mkdir(0o711)
    if what == "writable":
        folder.chmod(0o777)
    elif what == "parent":
        tmp_path.chmod(0o777)
    elif what == "linked":
        (tmp_path / "link").symlink_to(folder)
        folder = tmp_path / "link"
    elif what == "no parent":
        folder = folder / "none" / "none"
    elif what == "a file":
        folder = folder / "file"
        folder.touch()
    else:
        (folder / SOCKET_NAME).touch()
    with pytest.raises(ConfigurationError) as caught:
        IpcPort(folder)
    line_of(caught.value)
    assert what != "no socket" or (folder / SOCKET_NAME).is_file()  # what is not ours stays


def test_a_provider_that_comes_back_is_found_again(
    start: Callable[..., Provider], tiny_served_model: ServedModel
) -> None:
    first = start(tiny_served_model, tensor_port=None, ipc=True)
    connection = first.connect()
    assert_served(connection, tiny_served_model)
    first.server.stop()
    with pytest.raises(Unavailable):
        ask(connection, ring_rows(3))
    with pytest.raises(Unavailable, match="no provider listens in"):
        ask(connection, ring_rows(3))
    again = Server("127.0.0.1", 0, first.state, tensor_port=None, ipc=port_of(first).folder)
    again.start(tiny_served_model)
    try:
        assert_served(connection, tiny_served_model)
    finally:
        connection.close()
        again.stop()


# ---- something in between -------------------------------------------------------------------------------------------


@pytest.fixture
def relay(provider: Provider, tmp_path: Path) -> Iterator[tuple[Relay, str]]:
    """Runs a relay in front of the provider. Yields the relay, and the URL at which a tenant reaches it."""
    folder = tmp_path / "relay"
    folder.mkdir(0o711)
    made = Relay(tmp_path / "record", str(port_of(provider).folder / SOCKET_NAME), folder / SOCKET_NAME)
    yield made, f"ipc:{folder}"
    made.close()


def test_a_relay_is_found_out_and_sees_nothing(provider: Provider, relay: tuple[Relay, str]) -> None:
    between, url = relay
    connection = IpcConnection(url, provider.identity())
    with pytest.raises(WrongPeer, match="another process stands between") as caught:
        connection.manifest()
    line_of(caught.value)
    assert between.recorded  # TLS went through it
    for word in (b"clear", b"PEER", b"VEIL", b"config"):
        assert word not in between.recorded
    until(lambda: not port_of(provider).status().num_connections, "the end of the connection")
    assert not provider.service.sessions


def test_tcp_stays_encrypted_through_a_relay(
    start: Callable[..., Provider], tiny_served_model: ServedModel, tmp_path: Path
) -> None:
    """All bytes of a tensor port connection are recorded. Neither the protocol's magic number nor parts of the rows may
    be among them."""
    running = start(tiny_served_model, tensor_port=0, ipc=True)
    assert running.server.tensor_port is not None
    between = Relay(tmp_path / "record", running.server.tensor_port)
    try:
        raw = tls.connect("127.0.0.1", int(between.place), running.identity())
        raw.send(frame.hello(FrameType.HELLO))
        while raw.step() is None:
            pass
        rows = ring_rows(1)
        header = Header(FrameType.REQUEST, 1, CALL, 1, COLS, 0, COLS * 4, 30_000)
        sent = b"".join(map(bytes, frame.frames(header, frame.tensor_bytes(rows))))
        raw.send(sent)
        while (reply := raw.step()) is None:
            pass
        raw.close()
        recorded = between.recorded
    finally:
        between.close()
    assert len(recorded) > len(sent) + len(reply)
    for secret in (frame.MAGIC, sent[48:80], bytes(reply[48:80])):
        assert secret not in recorded


def test_clear_is_refused_on_the_tensor_port(
    start: Callable[..., Provider], tiny_served_model: ServedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """A tenant that names the socket's protocol in its TLS handshake is disconnected. If it sends `clear`, or a frame
    type of the socket, after an honest handshake, it gets an error for a malformed frame."""
    running = start(tiny_served_model, tensor_port=0, ipc=False)
    port, identity = running.server.tensor_port, running.identity()
    context = ssl.create_default_context(cadata=identity.ca_pem.decode())
    context.load_cert_chain(running.folder / "acme" / "cert.pem", running.folder / "acme" / "key.pem")
    context.set_alpn_protocols([IPC_ALPN])
    with (
        socket.create_connection(("127.0.0.1", port or 0), WAIT_S) as plain,
        contextlib.suppress(OSError),
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        assert secured.recv(1) == b""
    stream = RawStream(running, "late", greet=False)
    stream.send(b"clear")
    stream.expect_error(0, WireCode.MALFORMED)
    assert [one.getMessage() for one in caplog.records if one.getMessage().startswith("refused: ")] == [
        "refused: it does not speak TLS 1.3 with this protocol (TLS)",
        "refused: its stream has a frame that cannot be read, or began without HELLO",
    ]
    stream.expect_end()
    stream.close()
    for kind in (FrameType.FETCH, FrameType.DATA):
        stream = RawStream(running, "late")
        stream.send(Header(kind).pack())
        stream.expect_error(0, WireCode.MALFORMED)
        stream.close()


# ---- who is let in --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (foreign_identity, Unauthenticated),
        (expired_identity, Unauthenticated),
        (unregistered_identity, Unauthenticated),
    ],
)
def test_an_identity_that_is_not_ours_is_refused(
    provider: Provider, tmp_path: Path, make: Callable[[Path, Provider], TlsIdentity], error: type[VeilbaseError]
) -> None:
    connection = IpcConnection(provider.ipc_url, make(tmp_path, provider))
    with pytest.raises(error) as caught:
        connection.manifest()
    line_of(caught.value)


def test_a_tenant_without_a_certificate_is_refused_before_anything_is_sent(provider: Provider) -> None:
    with pytest.raises(ConfigurationError, match="needs an identity"):
        IpcConnection(provider.ipc_url, None)
    plain = dial_ipc(provider)
    context = ssl.create_default_context(cadata=provider.state.ca.pem.decode())
    context.set_alpn_protocols([IPC_ALPN])
    with contextlib.suppress(OSError), context.wrap_socket(plain, server_hostname="localhost") as secured:
        assert secured.recv(1) == b""
    until(lambda: not port_of(provider).status().num_connections, "the end of the connection")


def test_revocation_acts_on_every_kind_of_call(provider: Provider) -> None:
    connection, other = provider.connect("fired"), provider.connect("kept")
    assert_served(connection, provider.served_model)
    name = connection.manifest().bundle[0].name
    revoke(provider.state, "fired")
    with pytest.raises(NotPermitted):
        ask(connection, ring_rows(3))
    with pytest.raises(NotPermitted):
        list(connection.fetch(name))
    with pytest.raises(NotPermitted):
        IpcConnection(provider.ipc_url, provider.identity("fired")).manifest()
    assert_served(other, provider.served_model)


def test_a_tenants_calls_are_bounded_here_too(provider: Provider) -> None:
    streams = [RawStream(provider, "greedy") for _ in range(8)]
    with pytest.raises(QuotaExceeded):
        IpcConnection(provider.ipc_url, provider.identity("greedy")).manifest()
    assert_served(provider.connect("modest"), provider.served_model)
    for stream in streams:
        stream.close()


def test_strangers_do_not_shut_tenants_out(
    start: Callable[..., Provider], tiny_served_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_module, "MAX_CONNECTIONS", 4)
    running = start(tiny_served_model, tensor_port=None, ipc=True)
    silent = [dial_ipc(running) for _ in range(4)]
    until(lambda: port_of(running).status().num_guests == 4, "no place is left")
    assert_served(running.connect(), running.served_model)
    assert_ends(silent.pop(0))  # the oldest
    for one in silent:
        one.close()


def test_a_tenant_that_reads_nothing_is_dropped(
    start: Callable[..., Provider], tiny_served_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TCP, the kernel ends a connection whose peer does not read. On a Unix socket the provider must do so
    itself."""
    monkeypatch.setattr(carrier_module, "UNREAD_TIMEOUT_MS", 100)
    running = start(tiny_served_model, tensor_port=None, ipc=True)
    deaf = connect_ipc(running, "deaf")
    deaf.send(frame.hello(FrameType.HELLO))
    size = 4096 * COLS * 4
    with contextlib.suppress(OSError):
        for number in range(1, 20):
            header = Header(FrameType.REQUEST, number, CALL, 4096, COLS, 0, size, 30_000)
            for message in frame.frames(header, memoryview(bytes(size))):
                deaf.send(message)
                give_up_at = time.monotonic() + WAIT_S
                while deaf.has_unsent and time.monotonic() < give_up_at:
                    deaf.wait_to_send(0.05)
    until(lambda: not running.service.sessions, "the end of the session")
    until(lambda: not port_of(running).status().num_connections, "the end of the connection")
    deaf.release()


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../ca_key.pem", "tenants.json", "ca_key.pem", "x" * 5000])
def test_no_other_file_can_be_asked_for(provider: Provider, name: str) -> None:
    connection = connect_ipc(provider, "curious")
    with pytest.raises(MalformedFrame):
        list(fetch(connection, name, 1 << 20, WAIT_S))
    connection.release()


def test_a_bundle_name_that_this_bundle_has_not_is_an_error(provider: Provider) -> None:
    assert "merges.txt" not in {file.name for file in provider.served_model.manifest().bundle}
    connection = connect_ipc(provider, "curious")
    with pytest.raises(VeilbaseError):
        list(fetch(connection, "merges.txt", 1 << 20, WAIT_S))
    connection.release()


def data(offset: int, total: int, payload: bytes) -> bytes:
    return Header(FrameType.DATA, offset=offset, total_bytes=total).pack() + payload


@pytest.mark.parametrize(
    "answers",
    [
        [data(0, 11, b"x" * 11)],  # more than announced
        [data(2, 10, b"x")],
        [data(0, 10, b"xx"), data(1, 10, b"xx")],
        [data(0, 10, b"xx"), data(2, 9, b"xx")],
        [data(0, 10, b"")],
        [frame.hello(FrameType.WELCOME)],
        [b"short"],
    ],
)
def test_a_file_that_does_not_come_as_announced_is_refused(answers: list[bytes]) -> None:
    near, far = (ClearSocket(plain, b"") for plain in socket.socketpair())
    say(far, *answers)
    with pytest.raises(MalformedFrame):
        list(fetch(near, "config.json", 10, WAIT_S))
    near.release()
    far.release()


def test_a_provider_that_ends_or_is_silent_in_a_file_is_one_error() -> None:
    near, far = (ClearSocket(plain, b"") for plain in socket.socketpair())
    say(far, data(0, 10, b"xx"))
    with pytest.raises(VeilbaseError, match="in time"):
        list(fetch(near, "config.json", 10, 0.05))
    far.end_sending()
    with pytest.raises(Unavailable, match="broke"):
        list(fetch(near, "config.json", 10, WAIT_S))
    near.release()
    far.release()


def test_a_connection_that_says_nothing_after_its_handshake_ends(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("provider.net.service.HANDSHAKE_S", 0.05)
    silent = connect_ipc(provider, "silent")
    with pytest.raises(OSError):
        hear(silent)
    until(lambda: not provider.service.status().calls, "its place is free")
    silent.release()


# ---- where the provider is not --------------------------------------------------------------------------------------


def identity_of(tmp_path: Path) -> TlsIdentity:
    state = StateDir(tmp_path / "state")
    enroll(state, "acme", tmp_path / "acme", "grpcs://127.0.0.1:1")
    return TlsIdentity.read(tmp_path / "acme")


def test_a_stale_socket_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "ipc").mkdir(0o711)
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "ipc" / SOCKET_NAME))
    with pytest.raises(Unavailable, match="its socket is left from one that has ended") as caught:
        IpcConnection(f"ipc:{tmp_path / 'ipc'}", identity_of(tmp_path)).manifest()
    line_of(caught.value)


@pytest.mark.parametrize(
    ("name", "error"),
    [("none", ConfigurationError), ("ipc", Unavailable), ("x" * 120, ConfigurationError), ("link", ConfigurationError)],
)
def test_a_folder_that_is_not_there_or_wrong_is_one_line(tmp_path: Path, name: str, error: type[VeilbaseError]) -> None:
    (tmp_path / "ipc").mkdir(0o711)
    (tmp_path / "link").symlink_to(tmp_path / "ipc")
    with pytest.raises(error) as caught:
        IpcConnection(f"ipc:{tmp_path / name}", identity_of(tmp_path)).manifest()
    line_of(caught.value)


@pytest.mark.parametrize("url", ["ipc:", "ipc:a\0b", "ipc:~nobody-of-this-name/x"])
def test_an_address_without_a_folder_is_one_line(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        folder_of(url)
    line_of(caught.value)
    assert folder_of("ipc:a/../b") == Path.cwd() / "b"


def test_a_full_backlog_is_one_line(tmp_path: Path, patience: None) -> None:
    """A provider that hangs accepts no connection. The kernel queues a few and refuses all others at once, and then the
    tenant gets an error of one line."""
    (tmp_path / "ipc").mkdir(0o711)
    path = str(tmp_path / "ipc" / SOCKET_NAME)
    with contextlib.ExitStack() as open_ones:
        listener = open_ones.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = open_ones.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(path)
        with pytest.raises(Unavailable, match="takes no further connection") as caught:
            IpcConnection(f"ipc:{tmp_path / 'ipc'}", identity_of(tmp_path)).manifest()
    line_of(caught.value)


def test_a_provider_that_is_full_is_asked_again(
    start: Callable[..., Provider], tiny_served_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_module, "MAX_CONNECTIONS", 2)
    running = start(tiny_served_model, tensor_port=None, ipc=True)
    streams = [RawStream(running, f"tenant{number}") for number in range(2)]
    tries: list[float] = []

    def free_one(seconds: float) -> float:
        tries.append(seconds)
        if len(tries) == 3:
            for stream in streams:
                stream.close()
        return seconds

    monkeypatch.setattr("wire.transport.ipc.connection.with_jitter", free_one)
    assert_served(running.connect("late"), tiny_served_model)
    assert len(tries) >= 3
    assert stream_connection.CROWDED_S > 1


# ---- other users ----------------------------------------------------------------------------------------------------


def test_a_provider_of_another_user_than_named_is_refused(provider: Provider) -> None:
    connection = IpcConnection(provider.ipc_url, provider.identity(), peer_uid=os.geteuid() + 1)
    with pytest.raises(ConfigurationError, match="to belong to the provider's user"):
        connection.manifest()
    same = IpcConnection(provider.ipc_url, provider.identity(), peer_uid=os.geteuid())
    assert same.manifest().groups
    same.close()


@root_only
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_tenant_of_another_user_is_served(provider: Provider) -> None:
    """The tenant's process runs as another user than the provider. It is admitted by its certificate, and its user id
    must be the one that the kernel reports."""
    identity = provider.identity("other")
    closed = {parent: mode(parent) for parent in port_of(provider).folder.parents if not mode(parent) & 0o001}

    def child() -> str:
        os.setuid(OTHER_UID)
        connection = IpcConnection(provider.ipc_url, identity)
        return str(len(connection.manifest().groups))

    for parent, bits in closed.items():
        parent.chmod(bits | 0o011)
    try:
        assert in_child(child) == str(len(provider.served_model.manifest().groups))
    finally:
        for parent, bits in closed.items():
            parent.chmod(bits)


@root_only
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_tenant_without_any_network_is_served(provider: Provider) -> None:
    """The tenant is in a network namespace of its own, in which even the loopback device is down."""
    identity = provider.identity("alone")

    def child() -> str:
        assert ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", provider.server.port), 1)
            return "there is a network"
        connection = IpcConnection(provider.ipc_url, identity)
        name = connection.manifest().bundle[0].name
        return f"{len(connection.manifest().groups)} {sum(map(len, connection.fetch(name)))}"

    manifest = provider.served_model.manifest()
    assert in_child(child) == f"{len(manifest.groups)} {manifest.bundle[0].size_bytes}"


@root_only
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_listener_of_another_user_gets_nothing(tmp_path: Path) -> None:
    """The test's user owns the folder and the socket, but the listening process is another user's. The tenant notices
    this and sends nothing."""
    (tmp_path / "ipc").mkdir(0o711)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "ipc" / SOCKET_NAME))
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.setuid(OTHER_UID)
        listener.listen()
        os.write(write, b"x")
        accepted, _ = listener.accept()
        os.write(write, b"got " + accepted.recv(100) + b".")
        os._exit(0)
    try:
        assert os.read(read, 1) == b"x"
        with pytest.raises(WrongPeer, match=f"user {os.geteuid()} .* one of user {OTHER_UID}") as caught:
            IpcConnection(f"ipc:{tmp_path / 'ipc'}", identity_of(tmp_path)).manifest()
        line_of(caught.value)
        assert os.read(read, 100) == b"got ."  # nothing was sent
    finally:
        os.waitpid(pid, 0)
        for end in (read, write):
            os.close(end)
        listener.close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused(provider: Provider) -> None:
    connection = provider.connect()
    assert_served(connection, provider.served_model)

    def child() -> str:
        with pytest.raises(ForkedConnection):
            ask(connection, ring_rows(1))
        connection.close()
        return "refused"

    assert in_child(child) == "refused"
    assert_served(connection, provider.served_model)


def test_both_ports_serve_side_by_side(start: Callable[..., Provider], tiny_served_model: ServedModel) -> None:
    running = start(tiny_served_model, tensor_port=0, ipc=True)
    by_tcp, here = GrpcConnection(running.url, running.identity()), running.connect()
    for connection in (by_tcp, here):
        assert_served(connection, tiny_served_model)
    assert (by_tcp.carrier, here.carrier) == (f"tensor port {running.server.tensor_port}", "ipc")
    by_tcp.close()
