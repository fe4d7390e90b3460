"""Connects to a provider's ports with arbitrary bytes: plain sockets, TLS ends that a test cuts where it likes, streams
of raw messages over any port, and a relay that keeps a copy."""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from provider.net.ports import IpcPort
from tests.support.identities import HOST, Authority
from tests.support.providers import Provider
from tests.support.ring_products import CALL
from tests.support.threads import in_thread
from tests.support.waiting import WAIT_S, end
from wire import frame
from wire.errors import MalformedFrame, WireCode
from wire.frame import Arithmetic, Call, Direction, FrameType, Header
from wire.transport.grpc_channel import STREAM_METHOD, open_channel
from wire.transport.ipc.clear_socket import ClearSocket
from wire.transport.ipc.folder import SOCKET_NAME
from wire.transport.ipc.handshake import tenant_handshake
from wire.transport.message_socket import MessageSocket
from wire.transport.tls import IPC_ALPN, TlsSocket, client_context, handshake

WRONG_GREETINGS = [
    (Header(FrameType.HELLO, code=1, total_bytes=4).pack() + b"VEIL", WireCode.VERSION),
    (Header(FrameType.HELLO, code=3, total_bytes=4).pack() + b"VEIL", WireCode.VERSION),
    (Header(FrameType.HELLO, code=2, total_bytes=4).pack() + b"EVIL", WireCode.MALFORMED),
    (Header(FrameType.REQUEST, 1, CALL).pack(), WireCode.MALFORMED),
    (Header(FrameType.CANCEL, 1).pack(), WireCode.MALFORMED),
    (b"GET / HTTP/1.1\r\n\r\n", WireCode.MALFORMED),
]
"""First messages of a stream that are no greeting of this protocol, each with the code of the error that it gets."""


def dial(port: int) -> socket.socket:
    """Returns a connection to a port of this machine."""
    return socket.create_connection(("127.0.0.1", port), WAIT_S)


def assert_ends(plain: socket.socket) -> None:
    """Waits until the other side ends a connection, and ignores what it sends before."""
    plain.settimeout(WAIT_S)
    with contextlib.suppress(ConnectionError):
        while plain.recv(1 << 16):
            pass
    plain.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Returns both ends of a TCP connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = dial(listener.getsockname()[1])
        far, _ = listener.accept()
    return near, far


def receive(connection: MessageSocket) -> bytes:
    """Waits for a message and returns it."""
    while (message := connection.next_message()) is None:
        try:
            connection.wait()
        except EOFError:  # it may have come with the last message
            if (message := connection.next_message()) is None:
                raise
            break
    return bytes(message)


def send_all(connection: MessageSocket, *messages: bytes) -> None:
    """Sends messages, and waits until the kernel has all of their bytes."""
    for message in messages:
        connection.send(message)
        while connection.has_unsent:
            connection.wait_to_send(0.1)


class RawPeer:
    """Implements the tenant's end of a connection or, if no host is given, the provider's end."""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, host: str | None = None) -> None:
        """Prepares the end of the connection. `plain` is a connected socket, `context` the TLS context of this end, and
        `host` the name of the provider that a tenant expects."""
        self.plain = plain
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=host is None, server_hostname=host)

    def shake_hands(self) -> None:
        """Performs the handshake. The last bytes of this end are sent by the next call of `send`."""
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                self.tls.do_handshake()
                return
            self.send()
            self._take()

    def records(self, *parts: bytes) -> bytes:
        """Encrypts each part, in a record of its own if the part is small. Returns all bytes that are still to be
        sent."""
        for part in parts:
            self.tls.write(part)
        return self.outgoing.read()

    def send(self, *parts: bytes) -> None:
        """Sends all bytes that are still to be sent, followed by these parts."""
        self.plain.sendall(self.records(*parts))

    def end(self) -> None:
        """Ends this direction of the TLS connection. The next call of `send` sends the bytes that say so."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self.tls.unwrap()

    def receive(self, num_bytes: int) -> bytes:
        """Waits for `num_bytes` decrypted bytes and returns them."""
        got = b""
        while len(got) < num_bytes:
            try:
                got += self.tls.read(num_bytes - len(got))
            except ssl.SSLWantReadError:
                self._take()
        return got

    def _take(self) -> None:
        data = self.plain.recv(1 << 16)
        if not data:
            raise ConnectionError("the other end closed the connection")
        self.incoming.write(data)


def raw_tenant(authority: Authority, *more: bytes, is_end: bool = False) -> tuple[RawPeer, TlsSocket]:
    """Makes a tenant that can send arbitrary bytes, and the provider's end.

    Together with the end of its handshake, the tenant sends `more` and the mark that nothing follows.
    """
    near, far = tcp_pair()
    peer = RawPeer(near, authority.client_context(), HOST)
    made: list[TlsSocket] = []
    thread = in_thread(lambda: made.append(handshake(far, authority.server_context())))
    peer.shake_hands()
    last = peer.records(*more)
    if is_end:
        peer.end()
    near.sendall(last + peer.records())
    end(thread)
    return peer, made[0]


def tls_ends(authority: Authority) -> tuple[TlsSocket, TlsSocket]:
    """Returns a tenant's end of a TLS connection, and the provider's."""
    near, far = tcp_pair()
    made: list[TlsSocket] = []
    thread = in_thread(lambda: made.append(handshake(far, authority.server_context())))
    mine = handshake(near, authority.client_context(), HOST)
    end(thread)
    return mine, made[0]


def dial_tensor_port(provider: Provider) -> socket.socket:
    """Returns a plain TCP connection to the tensor port."""
    assert provider.server.tensor_port is not None
    return dial(provider.server.tensor_port)


def carrier_of(provider: Provider) -> str:
    """Returns the text that a tenant's connection shows if this provider's tensor port carries the stream."""
    return f"tensor port {provider.server.tensor_port}"


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


class RawTls(RawPeer):
    """Sends messages by `connection`, as any tenant does, and arbitrary bytes by `send` or `records`."""

    def __init__(self, provider: Provider, name: str) -> None:
        identity = provider.identity(name)
        context = client_context(identity.ca_pem, identity.cert_pem, identity.key_pem)
        super().__init__(dial_tensor_port(provider), context, "127.0.0.1")
        self.shake_hands()
        self.send()
        self.connection = TlsSocket(self.plain, self.tls, self.incoming, self.outgoing)


class Link(Protocol):
    """Sends and receives arbitrary messages, over either port."""

    def send(self, message: bytes) -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> bytes: ...
    def half_close(self) -> None: ...
    def close(self) -> None: ...
    def is_active(self) -> bool: ...


class GrpcLink:
    """Carries messages over the gRPC port."""

    def __init__(self, provider: Provider, name: str) -> None:
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = open_channel(provider.url, provider.identity(name))
        method = self._channel.stream_stream(STREAM_METHOD)
        self._call = method(iter(self._outgoing.get, None), timeout=WAIT_S)

    def send(self, message: bytes) -> None:
        """Sends one message."""
        self._outgoing.put(message)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> bytes:
        message: bytes = next(self._call)
        return message

    def half_close(self) -> None:
        """Stops sending. The provider may still send messages."""
        self._outgoing.put(None)

    def is_active(self) -> bool:
        """Returns whether the stream can still be read."""
        return bool(self._call.is_active())

    def close(self) -> None:
        """Ends the stream."""
        self.half_close()
        self._call.cancel()
        self._channel.close()


class SocketLink:
    """Carries messages over the tensor port or the socket of one host."""

    def __init__(self, connection: MessageSocket) -> None:
        self.connection = connection
        self._is_active = True

    def send(self, message: bytes) -> None:
        """Sends one message."""
        with contextlib.suppress(OSError):  # as with gRPC, an end shows only when reading
            self.connection.send(message)
            give_up_at = time.monotonic() + WAIT_S
            while self.connection.has_unsent and time.monotonic() < give_up_at:
                self.connection.wait_to_send(0.1)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> bytes:
        while (message := self.connection.next_message()) is None:
            try:
                self.connection.wait()
            except EOFError:
                if (message := self.connection.next_message()) is not None:
                    break
                self._is_active = False
                raise StopIteration from None
            except OSError:
                self._is_active = False
                raise
        return bytes(message)

    def half_close(self) -> None:
        """Stops sending. The provider may still send messages."""
        self.connection.end_sending()

    def is_active(self) -> bool:
        """Returns whether the stream can still be read."""
        with contextlib.suppress(OSError, EOFError, MalformedFrame):
            self.connection.receive()
            return self._is_active
        return False

    def close(self) -> None:
        """Ends the stream."""
        self.connection.release()


def connect(provider: Provider, name: str, receive_bytes: int | None = None) -> MessageSocket:
    """Returns a connection to the tensor port, on which reading fails after a time limit."""
    identity = provider.identity(name)
    plain = socket.socket()
    if receive_bytes is not None:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    assert provider.server.tensor_port is not None
    plain.connect(("127.0.0.1", provider.server.tensor_port))
    made = handshake(plain, client_context(identity.ca_pem, identity.cert_pem, identity.key_pem), "127.0.0.1")
    plain.settimeout(WAIT_S)
    return made


def port_of(provider: Provider) -> IpcPort:
    """Returns the port of a provider that serves tenants of this host."""
    assert provider.server.ipc is not None
    return provider.server.ipc


def dial_ipc(provider: Provider) -> socket.socket:
    """Returns a plain connection to the socket of this host, on which nothing was said."""
    plain = socket.socket(socket.AF_UNIX)
    plain.settimeout(WAIT_S)
    plain.connect(str(port_of(provider).folder / SOCKET_NAME))
    return plain


def connect_ipc(provider: Provider, name: str) -> ClearSocket:
    """Returns a connection to the socket of this host, on which reading fails after WAIT_S seconds."""
    identity, plain = provider.identity(name), dial_ipc(provider)
    made = tenant_handshake(plain, client_context(identity.ca_pem, identity.cert_pem, identity.key_pem, IPC_ALPN))
    plain.settimeout(WAIT_S)
    return made


def open_link(provider: Provider, name: str) -> Link:
    """Opens a stream as a tenant does: on the socket of one host or over the tensor port if the provider has one,
    otherwise over gRPC."""
    if provider.server.ipc is not None:
        return SocketLink(connect_ipc(provider, name))
    return GrpcLink(provider, name) if provider.server.tensor_port is None else SocketLink(connect(provider, name))


_NO_CALL = Call(0, Direction.FORWARD, Arithmetic.RING)


class RawStream:
    """Sends arbitrary bytes on one stream."""

    def __init__(self, provider: Provider, name: str = "raw", greet: bool = True) -> None:
        self.call = open_link(provider, name)
        if greet:
            self.send(frame.hello(FrameType.HELLO))
            assert self.receive().kind is FrameType.WELCOME

    def send(self, *messages: bytes) -> None:
        """Sends messages unchanged."""
        for message in messages:
            self.call.send(message)

    def request(self, request_id: int, tensor: torch.Tensor, call: Call = CALL, **changes: int) -> list[bytes]:
        """Returns the messages of a request, with `changes` made to its header."""
        size = tensor.numel() * 4
        fields = {"rows": tensor.shape[0], "cols": tensor.shape[1], "total_bytes": size, "deadline_ms": 30_000}
        header = Header(FrameType.REQUEST, request_id, call, **{**fields, **changes})
        return list(frame.frames(header, frame.tensor_bytes(tensor)))

    def receive(self) -> Header:
        """Returns the next frame's header."""
        return frame.parse(next(self.call))[0]

    def expect_error(self, request_id: int, code: WireCode) -> Header:
        """Checks that the next frame is this error and holds nothing else."""
        header = self.receive()
        assert (header.kind, header.request_id, WireCode(header.code)) == (FrameType.ERROR, request_id, code)
        assert (header.call, header.rows, header.cols, header.offset, header.total_bytes) == (_NO_CALL, 0, 0, 0, 0)
        assert code is WireCode.QUOTA or header.deadline_ms == 0
        return header

    def expect_end(self) -> None:
        """Checks that the provider ends the stream."""
        with pytest.raises(StopIteration):
            next(self.call)

    def half_close(self) -> None:
        """Stops sending."""
        self.call.half_close()

    def close(self) -> None:
        """Ends the stream."""
        self.call.close()


_CODE = """
import os, socket, sys, threading
family, listen_at, target, record, uid = sys.argv[1:]
if int(uid):
    os.setuid(int(uid))
family = getattr(socket, family)
address = (lambda text: text) if family == socket.AF_UNIX else (lambda text: ("127.0.0.1", int(text)))
kept, lock = open(record, "wb", buffering=0), threading.Lock()
listener = socket.socket(family)
listener.bind(address(listen_at))
listener.listen()
print("ready", listener.getsockname()[1] if family == socket.AF_INET else listen_at, flush=True)

def pump(source, sink):
    try:
        while data := source.recv(1 << 16):
            with lock:
                kept.write(data)
            sink.sendall(data)
    except OSError:
        pass
    for one in (source, sink):
        try:
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

while True:
    near, _ = listener.accept()
    far = socket.socket(family)
    far.connect(address(target))
    for pair in ((near, far), (far, near)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""


class Relay:
    """Runs a relay in a process of its own, until `close` is called."""

    def __init__(self, record: Path, target: str | int, listen_at: Path | None = None, uid: int = 0) -> None:
        """Starts the relay, and waits until it listens.

        Args:
            record: the file that gets every byte of either direction.
            target: the path of the provider's socket, or the provider's port on this machine.
            listen_at: the path to listen at; None for a port of its own choice.
            uid: the user as whom it runs; 0 for the test's own user.
        """
        self._record = record
        family = "AF_INET" if listen_at is None else "AF_UNIX"
        command = [sys.executable, "-c", _CODE, family, str(listen_at or 0), str(target), str(record), str(uid)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        word, self.place = self._process.stdout.readline().split()
        assert word == "ready"

    @property
    def recorded(self) -> bytes:
        """Returns all bytes that were passed on so far."""
        return self._record.read_bytes()

    def close(self) -> None:
        """Ends the relay's process."""
        self._process.kill()
        self._process.communicate()
