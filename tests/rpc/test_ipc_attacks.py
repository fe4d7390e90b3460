"""Plays hostile users of the provider's own host: descriptors and out-of-band bytes among the messages, relays of other
users, sockets that change between the look at them and the connection, handshakes that are fed slowly, and streams that
were open when their tenant was revoked."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from provider.identity.registry import revoke
from provider.model.served_model import ServedModel
from tests.support.files import mode
from tests.support.providers import Provider
from tests.support.raw_peers import RawPeer, RawStream, Relay, assert_ends, connect_ipc, dial_ipc, port_of
from tests.support.ring_products import assert_served
from tests.support.waiting import WAIT_S, until
from wire import frame
from wire.errors import ConfigurationError, Unauthenticated, Unavailable, WireCode, WrongPeer
from wire.frame import FrameType, Header
from wire.limits import MAX_FRAME_BYTES
from wire.transport.ipc import connection as connection_module
from wire.transport.ipc import handshake as handshake_module
from wire.transport.ipc.connection import IpcConnection
from wire.transport.ipc.folder import SOCKET_NAME, check_folder, folder_of
from wire.transport.tls import IPC_ALPN, client_context

OTHER_UID = 65_534
LENGTH = struct.Struct("<I")
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="this system has no SO_PEERCRED")


@pytest.fixture
def provider(start: Callable[..., Provider], tiny_served_model: ServedModel) -> Provider:
    return start(tiny_served_model, tensor_port=None, ipc=True)


def path_of(provider: Provider) -> str:
    return str(port_of(provider).folder / SOCKET_NAME)


def assert_left(provider: Provider) -> None:
    """Checks that the provider has ended every connection, and serves a tenant."""
    until(lambda: not port_of(provider).status().num_connections, "the end of the connection")
    assert_served(provider.connect("honest"), provider.served_model)


# ---- what a Unix socket can carry besides bytes ----------------------------------------------------------------------


def assert_closed(reader: int, writer: int) -> None:
    """Checks that nobody holds the reading end of a pipe once this process has closed its own."""
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        os.write(writer, b"x")
    os.close(writer)


def test_descriptors_among_the_messages_are_not_kept(provider: Provider) -> None:
    """A tenant sends a file descriptor along with its HELLO. The provider answers as ever, and the kernel closes the
    descriptor, since nobody takes it."""
    connection, (reader, writer) = connect_ipc(provider, "giver"), os.pipe()
    hello = frame.hello(FrameType.HELLO)
    socket.send_fds(connection._plain, [LENGTH.pack(len(hello)) + hello], [reader] * 200)
    while (answer := connection.next_message()) is None:
        connection.wait()
    assert frame.parse(answer)[0].kind is FrameType.WELCOME
    assert_closed(reader, writer)
    connection.release()


def test_descriptors_before_the_handshake_are_not_kept(provider: Provider) -> None:
    plain, (reader, writer) = dial_ipc(provider), os.pipe()
    socket.send_fds(plain, [b"no TLS"], [reader] * 200)
    assert_ends(plain)
    assert_closed(reader, writer)
    assert_left(provider)


def send_aside(plain: socket.socket) -> None:
    """Sends a byte out of band, where the system's Unix sockets can."""
    try:
        plain.send(b"!", socket.MSG_OOB)
    except OSError:
        pytest.skip("Unix sockets of this system carry nothing out of band")


@pytest.mark.parametrize("when", ["alone", "before", "inside"])
def test_a_byte_out_of_band_is_part_of_no_message(provider: Provider, when: str) -> None:
    """At an out-of-band byte, `recv` may return nothing, as at the end of a connection. So the tenant that sent the
    byte is answered, or its connection ends. Other tenants are served as before."""
    connection, hello = connect_ipc(provider, "odd"), frame.hello(FrameType.HELLO)
    plain, whole = connection._plain, LENGTH.pack(len(hello)) + hello
    cut = {"alone": len(whole), "before": 0, "inside": 9}[when]
    plain.sendall(whole[:cut])
    send_aside(plain)
    with contextlib.suppress(ConnectionError):
        plain.sendall(whole[cut:])
        while (answer := connection.next_message()) is None:
            connection.wait()
        assert frame.parse(answer)[0].kind is FrameType.WELCOME
    connection.release()
    assert_left(provider)


# ---- relays, and sockets that change -------------------------------------------------------------------------------


@pytest.fixture
def open_parents(provider: Provider) -> Iterator[None]:
    """Lets other users walk through the test's folders."""
    closed = {parent: mode(parent) for parent in port_of(provider).folder.parents if not mode(parent) & 0o001}
    for parent, bits in closed.items():
        parent.chmod(bits | 0o011)
    yield
    for parent, bits in closed.items():
        parent.chmod(bits)


@root_only
def test_a_relay_of_another_user_in_its_own_folder_is_found_out(
    provider: Provider, tmp_path: Path, open_parents: None
) -> None:
    """Another user has a folder of its own, in good order, and passes on what a tenant that was given its name sends.
    Certificates are right, and the listener owns the folder, but the listening process is not the one that the provider
    states."""
    folder = tmp_path / "mallory"
    folder.mkdir(0o711)
    os.chown(folder, OTHER_UID, OTHER_UID)
    record = folder / "record"
    between = Relay(record, path_of(provider), folder / SOCKET_NAME, uid=OTHER_UID)
    try:
        with pytest.raises(WrongPeer, match="another process stands between"):
            IpcConnection(f"ipc:{folder}", provider.identity()).manifest()
        with pytest.raises(ConfigurationError, match="to belong to the provider's user"):
            IpcConnection(f"ipc:{folder}", provider.identity(), peer_uid=os.geteuid()).manifest()
        recorded = between.recorded
    finally:
        between.close()
    assert recorded
    for word in (b"clear", b"PEER", b"VEIL"):
        assert word not in recorded
    assert_left(provider)


def test_a_socket_that_is_replaced_after_the_look_gets_no_frame(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check of the socket and the connection, a relay takes the path over."""
    made: list[Relay] = []
    real = tmp_path / "real"

    def replaced(folder: Path, owner: int) -> str:
        if not made:
            Path(path_of(provider)).rename(real)
            made.append(Relay(tmp_path / "record", str(real), folder / SOCKET_NAME))
        return path_of(provider)

    monkeypatch.setattr(connection_module, "check_socket", replaced)
    try:
        with pytest.raises(WrongPeer, match="another process stands between"):
            IpcConnection(provider.ipc_url, provider.identity()).manifest()
        assert b"VEIL" not in made[0].recorded
    finally:
        for one in made:
            one.close()


def test_a_listener_without_the_providers_certificate_gets_no_frame(
    start: Callable[..., Provider], tiny_served_model: ServedModel
) -> None:
    """A process of the provider's own user listens in the folder with a certificate of another authority."""
    one, other = (start(tiny_served_model, tensor_port=None, ipc=True) for _ in range(2))
    connection = IpcConnection(other.ipc_url, one.identity())
    with pytest.raises(Unauthenticated) as caught:
        connection.manifest()
    assert "\n" not in str(caught.value)
    assert_left(other)


# ---- handshakes -----------------------------------------------------------------------------------------------------


def hello_of(provider: Provider) -> bytes:
    """Returns the bytes with which an honest tenant begins its handshake."""
    identity = provider.identity()
    near, far = socket.socketpair()
    context = client_context(identity.ca_pem, identity.cert_pem, identity.key_pem, IPC_ALPN)
    peer = RawPeer(near, context, "localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        peer.tls.do_handshake()
    near.close()
    far.close()
    return peer.outgoing.read()


def test_a_handshake_that_is_fed_byte_by_byte_gets_no_more_time(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes when the provider has read the last one. The deadline is for the handshake as a whole."""
    monkeypatch.setattr(handshake_module, "HANDSHAKE_TIMEOUT_S", 0.3)
    hello, plain = hello_of(provider), dial_ipc(provider)
    with contextlib.suppress(OSError):
        for number in range(len(hello) - 1):
            plain.send(hello[number : number + 1])
            with contextlib.suppress(TimeoutError):
                plain.settimeout(0.01)
                if plain.recv(1) == b"":
                    break
        else:
            pytest.fail("the whole hello but its last byte was waited for")
    plain.close()
    assert_left(provider)


def test_a_provider_that_does_not_answer_the_handshake_is_one_line(
    provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake_module, "HANDSHAKE_TIMEOUT_S", 0.1)
    folder = tmp_path / "silent"
    folder.mkdir(0o711)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(folder / SOCKET_NAME))
        silent.listen()
        with pytest.raises(Unavailable, match="did not answer the handshake in time") as caught:
            IpcConnection(f"ipc:{folder}", provider.identity()).manifest()
    assert "\n" not in str(caught.value)


def test_a_stranger_that_floods_the_handshake_is_left(provider: Provider) -> None:
    """A peer sends a record that is no handshake, and goes on sending."""
    plain = dial_ipc(provider)
    with contextlib.suppress(OSError):
        for _ in range(64):
            plain.sendall(bytes(1 << 16))
        pytest.fail("all was taken")
    plain.close()
    assert_left(provider)


# ---- open streams ---------------------------------------------------------------------------------------------------


def test_revocation_ends_a_stream_that_is_silent(provider: Provider) -> None:
    stream = RawStream(provider, "fired")
    revoke(provider.state, "fired")
    stream.expect_error(0, WireCode.NOT_PERMITTED)
    stream.expect_end()
    stream.close()
    assert_left(provider)


@pytest.mark.parametrize("when", ["first", "later"])
def test_a_message_above_the_limit_ends_the_connection(provider: Provider, when: str) -> None:
    """The announced length alone ends it; no memory is taken for the message."""
    connection = connect_ipc(provider, "large")
    if when == "later":
        connection.send(frame.hello(FrameType.HELLO))
        while connection.next_message() is None:
            connection.wait()
    connection._plain.sendall(LENGTH.pack(MAX_FRAME_BYTES + 1) + b"rest")
    with contextlib.suppress(EOFError, OSError):
        while (answer := connection.next_message()) is None:
            connection.wait()
        header = frame.parse(answer)[0]
        assert (header.kind, WireCode(header.code)) == (FrameType.ERROR, WireCode.MALFORMED)
    connection.release()
    assert_left(provider)


def test_a_fetch_inside_a_stream_is_malformed(provider: Provider) -> None:
    stream = RawStream(provider, "late")
    stream.send(Header(FrameType.FETCH).pack())
    stream.expect_error(0, WireCode.MALFORMED)
    stream.close()
    assert_left(provider)


def test_a_tenant_that_announces_its_end_and_goes_on_is_left(provider: Provider) -> None:
    stream = RawStream(provider, "endless")
    plain = stream.call.connection._plain  # type: ignore[attr-defined]
    plain.sendall(LENGTH.pack(0xFFFF_FFFF))
    done = threading.Event()

    def go_on() -> None:
        with contextlib.suppress(OSError):
            while True:
                plain.sendall(bytes(1 << 16))
        done.set()

    threading.Thread(target=go_on, daemon=True).start()
    assert done.wait(WAIT_S)
    stream.close()
    assert_left(provider)


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31m", "a\udcff"])
def test_a_name_that_cannot_be_printed_is_one_line(tmp_path: Path, name: str) -> None:
    """An error that names the folder is printed and logged; it must stay one line, without control characters."""
    with pytest.raises(ConfigurationError, match="printed") as caught:
        folder_of(f"ipc:{tmp_path}/{name}")
    assert str(caught.value).isprintable()
    with pytest.raises(ConfigurationError, match="printed") as caught:
        check_folder(tmp_path / name)
    assert str(caught.value).isprintable()
