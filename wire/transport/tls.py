"""This module carries messages of a tensor stream over TLS 1.3 without gRPC, with certificates on both sides
(wire/SPEC.md, section 1).

It makes the TLS contexts of both ends, and does the handshake on a connected socket, whatever the socket's family is. A
`TlsSocket` then sends messages; each has its length in front, and nothing else is sent. A `TensorStream` is the
tenant's end of a stream, on the provider's tensor port, which `connect` opens, or on a Unix socket
(wire/transport/ipc), which is not encrypted after the handshake.

gRPC's Python library takes 200 to 310 µs on loopback to move a small message there and back. This module takes 60 to 70
µs (docs/decisions/0007-tensor-port.md), and less than half of gRPC's processor time for large messages. TLS is the
standard library's; flow control and keepalive are TCP's.

Guarantees: no file that a private key is written to outlives the call. The handshake, and all messages of `say` and
`hear`, have one deadline together, which a peer that sends a byte now and then does not extend. The peer speaks the
application protocol that this end expects. Connections of `TlsSocket` use TLS 1.3 with certificates on both sides, and
have the guarantees of wire/transport/message_socket.py.

There are two locks: OpenSSL's state allows one call at a time, and records must be sent in the order in which they were
encrypted. No thread holds a lock while it waits for the peer.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import ssl
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import cast

from wire.errors import MalformedFrame, Unavailable
from wire.limits import KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS
from wire.transport.busy_poll import tenants_most_s
from wire.transport.identity import TlsIdentity
from wire.transport.message_socket import LENGTH, MessageSocket

ALPN = "veilbase/1"
IPC_ALPN = "veilbase-ipc/1"
"""The application protocol on a Unix socket. It differs from the TCP ports' protocol, so that neither end can be led
from a port that stays encrypted to a socket that does not, or the other way round."""


def client_context(ca_pem: bytes, cert_pem: bytes, key_pem: bytes, alpn: str = ALPN) -> ssl.SSLContext:
    """Returns the TLS context of the tenant's end. The context also checks the name of the provider's host.

    Args:
        ca_pem, cert_pem, key_pem: the certificate of the provider's CA, this end's certificate and its key.
        alpn: the one application protocol that this end speaks.

    Raises:
        ssl.SSLError: OpenSSL does not accept a certificate or the key.
        ValueError: `ca_pem` is not ASCII.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, ca_pem, cert_pem, key_pem, alpn)


def server_context(ca_pem: bytes, cert_pem: bytes, key_pem: bytes, alpn: str = ALPN) -> ssl.SSLContext:
    """Returns the TLS context of the provider's end, which demands a certificate of the provider's CA; see
    `client_context`."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, ca_pem, cert_pem, key_pem, alpn)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # No session is ever resumed.
    return context


def _context(protocol: int, ca_pem: bytes, cert_pem: bytes, key_pem: bytes, alpn: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([alpn])
    context.load_verify_locations(cadata=ca_pem.decode("ascii"))
    # The ssl module reads keys from files only. On Linux the file is in memory; elsewhere it is deleted soon.
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("veilbase", os.MFD_CLOEXEC), "wb") as file:
            file.write(key_pem + b"\n" + cert_pem)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    else:  # pragma: no cover - not Linux
        with tempfile.NamedTemporaryFile() as named:
            named.write(key_pem + b"\n" + cert_pem)
            named.flush()
            context.load_cert_chain(named.name)
    return context


RECEIVE_BYTES = 1 << 18


@dataclass
class TlsPipe:
    """Holds the parts of a TLS connection on a socket.

    Attributes:
        plain: the connected socket.
        tls: the state of TLS, which reads and writes the two memory buffers.
        incoming: encrypted bytes that were received and are not decrypted yet.
        outgoing: encrypted bytes that are not sent yet.
        give_up_at_s: the deadline of the handshake and of `say` and `hear`, on `time.monotonic`'s clock.
    """

    plain: socket.socket
    tls: ssl.SSLObject
    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO
    give_up_at_s: float

    def say(self, data: bytes) -> None:
        """Encrypts and sends bytes. Raises OSError if the connection broke or the deadline has passed."""
        self.tls.write(data)
        self.send_out()

    def hear(self, num_bytes: int) -> bytes:
        """Waits for `num_bytes` bytes and returns them decrypted.

        Raises:
            OSError: TLS failed, the connection broke, the peer ended it, or the deadline has passed.
        """
        got = b""
        while len(got) < num_bytes:
            try:
                part = self.tls.read(num_bytes - len(got))
            except ssl.SSLWantReadError:
                self.exchange()
                continue
            if not part:
                raise ConnectionError("the peer ended the connection")
            got += part
        return got

    @property
    def has_more(self) -> bool:
        """Tells whether bytes were received that `hear` has not returned yet."""
        return bool(self.incoming.pending or self.tls.pending())

    def exchange(self) -> None:
        """Sends the bytes in `outgoing`, and receives once from the socket into `incoming`."""
        self.send_out()
        self.plain.settimeout(self._left())
        data = self.plain.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionError("the peer closed the connection")
        self.incoming.write(data)

    def send_out(self) -> None:
        """Sends the bytes in `outgoing`."""
        data = self.outgoing.read()
        if data:
            self.plain.settimeout(self._left())
            self.plain.sendall(data)

    def _left(self) -> float:
        left = self.give_up_at_s - time.monotonic()
        if left <= 0:  # A peer that sends a byte now and then gets no more time than a silent one.
            raise TimeoutError("the handshake took too long")
        return left


def shake_hands(
    plain: socket.socket, context: ssl.SSLContext, server_name: str | None, alpn: str, timeout_s: float
) -> TlsPipe:
    """Does the TLS handshake and returns the connection. Callers must close the socket if this fails.

    Args:
        plain: a connected socket.
        context: the TLS context of this end.
        server_name: the host that the tenant expects; None at the provider's end.
        alpn: the application protocol that the peer must have agreed to.
        timeout_s: the seconds for the handshake and for all calls of the result's `say` and `hear` together.

    Raises:
        OSError: TLS was refused (`ssl.SSLError`) or took too long, or the connection broke.
    """
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_side=server_name is None, server_hostname=server_name)
    pipe = TlsPipe(plain, tls, incoming, outgoing, time.monotonic() + timeout_s)
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            pipe.exchange()
        finally:
            pipe.send_out()  # This sends an alert if the handshake failed.
    if tls.selected_alpn_protocol() != alpn:
        raise ssl.SSLError("the peer speaks another protocol")
    return pipe


HANDSHAKE_TIMEOUT_S = 10.0
UNREAD_TIMEOUT_MS = 300_000
"""How many milliseconds the provider waits for a tenant that reads nothing: as long as the tenant's longest request may
take. While a tenant computes, it acknowledges TCP's probes and reads nothing, which looks to Linux like a tenant that
is gone. A provider always reads, so a tenant waits for KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS only."""
_RECORD_BYTES = 1 << 14
"""The most unencrypted bytes in a TLS record, and so the most that one read returns."""
_KEEPALIVE_PROBES = 2
_ANSWER_BYTES = 1 << 16
"""The most bytes that TLS itself may queue between two messages, for instance because a peer asks for new keys. They
are sent with the next message. A peer that makes TLS queue more is trying to fill this end's memory."""


def handshake(
    plain: socket.socket, context: ssl.SSLContext, server_name: str | None = None, busy_poll_s: float = 0.0
) -> TlsSocket:
    """Does the TLS handshake on a connected TCP socket and returns a socket that carries messages. If the handshake
    fails, this closes the connected socket.

    Args:
        plain: a connected socket, which belongs to the result from now on.
        context: the TLS context of this end.
        server_name: the host that the tenant expects; None at the provider's end.
        busy_poll_s: for how many seconds `MessageSocket.wait` polls for a reply before it sleeps.

    Raises:
        OSError: TLS was refused (`ssl.SSLError`) or took too long, or the connection broke.
    """
    try:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _leave_pacing(plain)
        _keep_alive(plain, UNREAD_TIMEOUT_MS if server_name is None else KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS)
        pipe = shake_hands(plain, context, server_name, ALPN, HANDSHAKE_TIMEOUT_S)
        return TlsSocket(plain, pipe.tls, pipe.incoming, pipe.outgoing, busy_poll_s)
    except BaseException:
        plain.close()
        raise


def _leave_pacing(plain: socket.socket) -> None:
    """Chooses Reno as the connection's congestion control if both ends are on this machine. BBR, the default of some
    systems, delays packets by timers, which loopback does not need."""
    try:
        peer = ipaddress.ip_address(plain.getpeername()[0])
    except (OSError, ValueError):
        return
    mapped = peer.ipv4_mapped if isinstance(peer, ipaddress.IPv6Address) else None
    if (mapped or peer).is_loopback and hasattr(socket, "TCP_CONGESTION"):
        with contextlib.suppress(OSError):  # Every Linux has Reno; if it may not be chosen, nothing changes.
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _keep_alive(plain: socket.socket, unread_ms: int) -> None:
    """Makes the kernel probe the peer as often as gRPC would, and end the connection if the peer acknowledges or reads
    nothing for `unread_ms`."""
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": KEEPALIVE_TIME_MS // 1000,
        "TCP_KEEPINTVL": KEEPALIVE_TIMEOUT_MS // 1000 // _KEEPALIVE_PROBES,
        "TCP_KEEPCNT": _KEEPALIVE_PROBES,
        "TCP_USER_TIMEOUT": unread_ms,
    }
    for name, value in options.items():
        if hasattr(socket, name):  # Not every system has each of these options.
            plain.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class TlsSocket(MessageSocket):
    """Carries messages over TLS; see `MessageSocket`."""

    FIRST_BYTES = _RECORD_BYTES - LENGTH.size  # The length prefix and these bytes fill one record.
    NEXT_BYTES = 1 << 17

    def __init__(
        self,
        plain: socket.socket,
        tls: ssl.SSLObject,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        busy_poll_s: float = 0.0,
    ) -> None:
        """Takes the objects that `shake_hands` has made; no other code may use them from now on."""
        super().__init__(plain, busy_poll_s)
        self._tls, self._incoming, self._outgoing = tls, incoming, outgoing
        self._tls_lock = threading.Lock()
        self._raw = memoryview(bytearray(RECEIVE_BYTES))
        with contextlib.suppress(EOFError, MalformedFrame):  # `receive` raises it again, after earlier messages.
            self._read_all()  # Messages may have come with the end of the handshake.

    def peer_certificate(self) -> bytes:
        return self._tls.getpeercert(binary_form=True) or b""

    def _as_sent(self, plain: bytes | memoryview) -> memoryview:
        """Returns the bytes `plain`, encrypted. The peer decrypts some bytes while this end encrypts the next."""
        with self._tls_lock:
            self._tls.write(plain)
            return memoryview(self._outgoing.read())

    def _receive_some(self, flags: int) -> int:
        return self._plain.recv_into(self._raw, 0, flags)

    def _take_in(self, count: int) -> None:
        self._incoming.write(self._raw[:count])
        self._read_all()
        if self._outgoing.pending > _ANSWER_BYTES:
            with self._tls_lock:  # Without the lock, the pending bytes may be a message's.
                if self._outgoing.pending > _ANSWER_BYTES:
                    raise ConnectionError("the peer asks for new keys again and again")

    def _read_all(self) -> None:
        # Pending bytes are checked first: OpenSSL asks for more by an exception, which costs as much as a record.
        while (self._incoming.pending or self._tls.pending()) and self._read():
            pass

    def _read(self) -> bool:
        """Decrypts a record, or the part of a large message that has come. Returns False if no whole record is
        there."""
        body = self._body
        try:
            if body is None:
                with self._tls_lock:
                    self._held += self._read_into(self._small[self._held :])
                self._split()
            else:
                self._read_body(body)
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLZeroReturnError:
            self._has_ended = True
            raise EOFError from None
        return True

    def _read_into(self, into: memoryview) -> int:
        count = cast(int, self._tls.read(len(into), into))  # type: ignore[call-overload]
        if not count:
            raise ssl.SSLZeroReturnError
        return count

    def _read_body(self, body: memoryview) -> None:
        # A MiB has 64 records, and each takes a call of OpenSSL, so this loop does nothing else for each record.
        read, incoming, filled, length = self._tls.read, self._incoming, self._filled, len(body)
        try:
            with self._tls_lock:
                while filled < length and incoming.pending:
                    count = cast(int, read(length - filled, body[filled:]))  # type: ignore[call-overload]
                    if not count:
                        raise ssl.SSLZeroReturnError
                    filled += count
        finally:
            self._filled = filled
        self._end_body()

    def end_sending(self) -> None:
        """Tells the peer that no more messages come. Callers must first flush what was queued."""
        self._check_process()
        with self._send_lock, self._tls_lock, contextlib.suppress(OSError):
            with contextlib.suppress(ssl.SSLError):  # OpenSSL would wait here until the peer ends too.
                self._tls.unwrap()
            self._plain.send(self._outgoing.read(), socket.MSG_DONTWAIT)
            self._plain.shutdown(socket.SHUT_WR)


_CONNECT_TIMEOUT_S = 3.0
"""The most seconds to wait for the TCP connection. If a firewall silently drops packets to the tensor port, the first
request is delayed by this time, and gRPC carries the stream."""


def connect(host: str, port: int, identity: TlsIdentity) -> TensorStream:
    """Opens a stream to a provider's tensor port.

    Args:
        host: the host of the provider's URL; the provider's certificate must name it.
        port: the tensor port from the provider's manifest.
        identity: the tenant's certificate and key.

    Raises:
        ConfigurationError: the environment variable for polling is wrong; see `busy_poll.tenants_most_s`.
        OSError: nothing listens or answers there, or the peer is not the expected provider (`ssl.SSLError`).
    """
    busy_poll_s = tenants_most_s()
    context = client_context(identity.ca_pem, identity.cert_pem, identity.key_pem)
    plain = socket.create_connection((host, port), _CONNECT_TIMEOUT_S)
    return TensorStream(handshake(plain, context, host, busy_poll_s))


class TensorStream:
    """Implements `MessageStream` over a `MessageSocket`: TLS to the provider's tensor port, or a Unix socket."""

    def __init__(self, connection: MessageSocket) -> None:
        """Makes a stream over a connection whose handshake is done, and which nothing else may use."""
        self._connection = connection
        self._end: Exception | None = None
        self._is_active = True

    def send(self, message: bytes | memoryview) -> None:
        try:
            self._connection.send(message)
        except OSError:
            self._is_active = False  # The next `step` raises the reason.

    @property
    def has_unsent(self) -> bool:
        return self._is_active and self._connection.has_unsent

    def wait_to_send(self, seconds: float) -> None:
        try:
            self._connection.wait_to_send(seconds)
        except OSError:
            self._is_active = False

    def step(self) -> bytes | memoryview | None:
        """Waits for a message; see `MessageStream.step`."""
        message = self._connection.next_message()
        if message is None and self._end is None:
            try:
                self._connection.wait()
            except (EOFError, OSError, MalformedFrame) as exc:
                self._end, self._is_active = exc, False
            message = self._connection.next_message()
        if message is None and self._end is not None:
            self._connection.release()
            self._raise()
        return message

    def _raise(self) -> None:
        if isinstance(self._end, EOFError):
            raise EOFError
        if isinstance(self._end, MalformedFrame):
            raise self._end
        what = "TLS failed" if isinstance(self._end, ssl.SSLError) else "the connection to the provider broke"
        raise Unavailable(
            f"{what}; a fine-tuning run that broke goes on from its last checkpoint when it is started again"
        )

    def is_active(self) -> bool:
        return self._is_active

    def close(self) -> None:
        """Ends the stream and closes its connection; see `MessageStream.close`."""
        self._is_active = False
        self._connection.close()
