"""This module sends messages over one TLS connection. Each message has its length in front, and nothing else is sent
(wire/SPEC.md, section 1).

gRPC's Python library takes 200 to 310 µs on loopback to move a small message there and back. This module takes 60 to 70
µs (docs/decisions/0007-tensor-port.md), and less than half of gRPC's processor time for large messages. TLS is the
standard library's; flow control and keepalive are TCP's.

Guarantees: TLS 1.3 with certificates on both sides, and those of `message_socket`.

There are two locks: OpenSSL's state allows one call at a time, and records must be sent in the order in which they were
encrypted. No thread holds a lock while it waits for the peer.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import threading
from typing import cast

from wire.errors import MalformedFrame
from wire.limits import KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS
from wire.transport.message_socket import LENGTH, MessageSocket
from wire.transport.tls_context import ALPN
from wire.transport.tls_handshake import RECEIVE_BYTES, shake_hands

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
    PIECE_BYTES = 1 << 17

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
        """Returns the peer's certificate in DER; its chain and dates have been verified."""
        return self._tls.getpeercert(binary_form=True) or b""

    def _piece_to_send(self, plain: bytes | memoryview) -> memoryview:
        """Returns the bytes `plain`, encrypted. The peer decrypts one piece while this end encrypts the next."""
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
