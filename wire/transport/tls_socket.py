"""This module sends messages over one TLS connection. Each message has its length in front, and nothing else is sent
(wire/SPEC.md, section 1).

gRPC's Python library takes 200 to 310 µs on loopback to move a small message there and back. This module takes 60 to 70
µs (docs/decisions/0007-tensor-port.md), and less than half of gRPC's processor time for large messages. TLS is the
standard library's; flow control and keepalive are TCP's.

Guarantees: TLS 1.3 with certificates on both sides. A message's length is checked before memory is allocated for the
message. `send`, `receive` and `close` may run at the same time in different threads, but only one thread at a time may
run `receive`. This module does not know what messages mean.

There are two locks: OpenSSL's state allows one call at a time, and records must be sent in the order in which they were
encrypted. No thread holds a lock while it waits for the peer.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from typing import cast

from wire.errors import ForkedConnection, MalformedFrame
from wire.limits import KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS, MAX_FRAME_BYTES
from wire.ring.buffers import unwritten
from wire.transport.busy_poll import SMALL_BYTES, BusyPoll
from wire.transport.tls_context import ALPN

HANDSHAKE_TIMEOUT_S = 10.0
UNREAD_TIMEOUT_MS = 300_000
"""How many milliseconds the provider waits for a tenant that reads nothing: as long as the tenant's longest request may
take. While a tenant computes, it acknowledges TCP's probes and reads nothing, which looks to Linux like a tenant that
is gone. A provider always reads."""
_LENGTH = struct.Struct("<I")
_RECORD_BYTES = 1 << 14
"""The most unencrypted bytes in a TLS record, and so the most that one read returns."""
_RECEIVE_BYTES = 1 << 18
_FIRST_BYTES = _RECORD_BYTES - _LENGTH.size
"""How many bytes of a message share a TLS record with its length prefix. They are copied for this; copying all of a
large message would cost more."""
_PIECE_BYTES = 1 << 17
"""How many bytes of a large message are encrypted at a time."""
_NOTHING = memoryview(b"")
"""An empty view that keeps no memory alive. It replaces an empty slice of a message, which would keep the whole message
alive."""
_KEEPALIVE_PROBES = 2
_ANSWER_BYTES = 1 << 16
"""The most bytes that TLS itself may queue between two messages, for instance because a peer asks for new keys. They
are sent with the next message. A peer that makes TLS queue more is trying to fill this end's memory."""


def handshake(
    plain: socket.socket, context: ssl.SSLContext, server_name: str | None = None, busy_poll_s: float = 0.0
) -> MessageSocket:
    """Does the TLS handshake on a connected socket and returns a socket that carries messages. If the handshake fails,
    this closes the connected socket.

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
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = context.wrap_bio(incoming, outgoing, server_side=server_name is None, server_hostname=server_name)
        give_up_at = time.monotonic() + HANDSHAKE_TIMEOUT_S
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                _exchange(plain, incoming, outgoing, give_up_at)
            finally:
                _send_all(plain, outgoing.read(), give_up_at)  # This sends an alert if the handshake failed.
        if tls.selected_alpn_protocol() != ALPN:
            raise ssl.SSLError("the peer speaks another protocol")
        return MessageSocket(plain, tls, incoming, outgoing, busy_poll_s)
    except BaseException:
        plain.close()
        raise


def _exchange(plain: socket.socket, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, give_up_at: float) -> None:
    _send_all(plain, outgoing.read(), give_up_at)
    plain.settimeout(_left(give_up_at))
    data = plain.recv(_RECEIVE_BYTES)
    if not data:
        raise ConnectionError("the peer closed the connection")
    incoming.write(data)


def _send_all(plain: socket.socket, data: bytes, give_up_at: float) -> None:
    if data:
        plain.settimeout(_left(give_up_at))
        plain.sendall(data)


def _left(give_up_at: float) -> float:
    left = give_up_at - time.monotonic()
    if left <= 0:  # A peer that sends a byte now and then gets no more time than a silent one.
        raise TimeoutError("the handshake took too long")
    return left


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


class MessageSocket:
    """Carries messages on a connection after its handshake. The receiving thread calls `next_message` until that
    returns None, then `wait`."""

    def __init__(
        self,
        plain: socket.socket,
        tls: ssl.SSLObject,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        busy_poll_s: float = 0.0,
    ) -> None:
        """Takes the objects that `handshake` has made; no other code may use them from now on."""
        plain.setblocking(True)  # `receive(0)` blocks until messages come; every other call passes MSG_DONTWAIT.
        self._plain, self._tls, self._incoming, self._outgoing = plain, tls, incoming, outgoing
        self._tls_lock, self._send_lock = threading.Lock(), threading.Lock()
        self._unsent: deque[bytes | memoryview] = deque()
        self._begun = self._cipher = _NOTHING
        """`_begun` is the unencrypted rest of a large message; `_cipher` is encrypted and not sent yet."""
        self._end_lock = threading.Lock()
        self._pid = os.getpid()
        self._is_closed = self._has_ended = False
        self._fault: str | None = None
        """The error text if the peer sent malformed bytes, else None. The exception itself is not kept, since its
        traceback would hold this object in a reference cycle."""
        self._raw = memoryview(bytearray(_RECEIVE_BYTES))
        self._small = memoryview(bytearray(2 * _RECORD_BYTES))
        self._held = 0
        """How many bytes in `_small` belong to no complete message yet."""
        self._body: memoryview | None = None
        self._filled = 0
        self._messages: deque[bytes | memoryview] = deque()
        self._busy_poll, self._readable = BusyPoll(busy_poll_s), select.poll()
        self._readable.register(plain, select.POLLIN)
        self._has_sent = False
        """Tells whether this end has sent anything since the last wait. If it has not, polling does not pay."""
        self.took_little = True
        """Tells whether the last message that `next_message` returned is small."""
        with contextlib.suppress(EOFError, MalformedFrame):  # `receive` raises it again, after earlier messages.
            self._read_all()  # Messages may have come with the end of the handshake.

    def peer_certificate(self) -> bytes:
        """Returns the peer's certificate in DER; its chain and dates have been verified."""
        return self._tls.getpeercert(binary_form=True) or b""

    def fileno(self) -> int:
        """Returns the socket's descriptor, for `poll`."""
        return self._plain.fileno()

    # ---- sending ----------------------------------------------------------------------------------------------------

    def send(self, message: bytes | memoryview) -> None:
        """Queues a message and sends at once as many bytes as the connection takes; this is safe under threads.

        Raises:
            ForkedConnection: this is a child of the process that opened the connection.
            OSError: the connection is broken or closed.
        """
        self._unsent.append(message)
        self._has_sent = True
        self.flush()

    @property
    def has_unsent(self) -> bool:
        """Tells whether any bytes of queued messages have not been sent yet."""
        return bool(self._unsent or self._cipher or self._begun)

    def flush(self) -> None:
        """Sends at once as many queued bytes as the connection takes; see `send` for errors."""
        self._check_process()
        with self._send_lock:
            if self._is_closed:
                raise ConnectionError("the connection was closed")
            while self.has_unsent:
                if not self._cipher:
                    self._cipher = self._encrypt()
                try:
                    sent = self._plain.send(self._cipher, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return
                self._cipher = self._cipher[sent:] or _NOTHING

    def wait_to_send(self, seconds: float) -> None:
        """Waits at most `seconds` until the connection takes more bytes, then flushes. This method is for a thread that
        does not receive."""
        with contextlib.suppress(ValueError):  # The connection was closed meanwhile, and `flush` says so.
            self._poll(select.POLLOUT, seconds)
        self.flush()

    def _encrypt(self) -> memoryview:
        """Returns the next encrypted piece of what is queued. The peer decrypts one piece while this end encrypts the
        next."""
        plain: bytes | memoryview
        if self._begun:
            plain, self._begun = self._begun[:_PIECE_BYTES], self._begun[_PIECE_BYTES:] or _NOTHING
        else:
            message = memoryview(self._unsent.popleft())
            plain = b"".join((_LENGTH.pack(len(message)), message[:_FIRST_BYTES]))
            self._begun = message[_FIRST_BYTES:] or _NOTHING
        with self._tls_lock:
            self._tls.write(plain)
            return memoryview(self._outgoing.read())

    # ---- receiving --------------------------------------------------------------------------------------------------

    def next_message(self) -> bytes | memoryview | None:
        """Returns the next message that has been received whole, or None if there is none. Only the thread that
        receives may call this."""
        if not self._messages:
            return None
        message = self._messages.popleft()
        self.took_little = len(message) <= SMALL_BYTES
        return message

    def wait(self) -> None:
        """Waits until bytes can be received or queued bytes can be sent, then receives or sends them. Only one thread
        at a time may call this.

        Raises:
            EOFError: the peer has said that it sends no more messages.
            MalformedFrame: the peer announced a length that no message may have.
            OSError: the connection is broken or closed, or the peer ended the connection without announcing this.
        """
        if self._is_closed:
            raise ConnectionError("the connection was closed")
        self._check_process()
        if self._has_ended or not self.has_unsent:
            is_likely, self._has_sent = self._has_sent and self.took_little, False
            self._busy_poll.look(self._is_readable, is_likely)
            self.receive(0)
            self._busy_poll.woke()
            return
        try:
            events = self._poll(select.POLLIN | select.POLLOUT)
        except ValueError:
            raise ConnectionError("the connection was closed") from None
        if events & select.POLLOUT:
            self.flush()
        if events & ~select.POLLOUT:
            self.receive()

    def _is_readable(self) -> object:
        return self._readable.poll(0)

    def _poll(self, wanted: int, seconds: float | None = None) -> int:
        poll = select.poll()
        poll.register(self._plain, wanted)
        ready = poll.poll(None if seconds is None else max(0, 1000 * seconds))
        return ready[0][1] if ready else 0

    def receive(self, flags: int = socket.MSG_DONTWAIT) -> None:
        """Receives the bytes that have come; waits for bytes only if `flags` is 0. See `wait` for errors."""
        self._check_process()
        if self._has_ended:
            raise EOFError if self._fault is None else MalformedFrame(self._fault)
        try:
            count = self._plain.recv_into(self._raw, 0, flags)
        except BlockingIOError:
            return
        if not count:
            raise ConnectionError("the peer closed the connection")
        self._incoming.write(self._raw[:count])
        self._read_all()
        if self._outgoing.pending > _ANSWER_BYTES:
            with self._tls_lock:  # Without the lock, the pending bytes may be a message's.
                if self._outgoing.pending > _ANSWER_BYTES:
                    raise ConnectionError("the peer asks for new keys again and again")

    def _check_process(self) -> None:
        """Refuses a forked child. Parent and child would encrypt with the same keys and counters, so an eavesdropper
        could compare what both send and read it."""
        if os.getpid() != self._pid:
            raise ForkedConnection("this connection was opened before a fork: open a new one in the child")

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
        if filled == length:
            self._messages.append(body)
            self._body = None

    def _split(self) -> None:
        """Takes the messages out of the small buffer. The beginning of a large message is copied into memory of its
        own."""
        held, start = self._small[: self._held], 0
        while len(held) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(held, start)
            if length > MAX_FRAME_BYTES:
                self._has_ended = True
                self._fault = f"expected a message of at most {MAX_FRAME_BYTES} bytes, got {length}"
                raise MalformedFrame(self._fault)
            start += _LENGTH.size
            here = held[start : start + length]
            if len(here) == length:
                self._messages.append(memoryview(bytearray(here)))
            else:
                self._body, self._filled = unwritten(length), len(here)
                self._body[: len(here)] = here
            start += len(here)
        self._held = len(held) - start
        self._small[: self._held] = held[start:]

    # ---- ending -----------------------------------------------------------------------------------------------------

    def end_sending(self) -> None:
        """Tells the peer that no more messages come. Callers must first flush what was queued."""
        self._check_process()
        with self._send_lock, self._tls_lock, contextlib.suppress(OSError):
            with contextlib.suppress(ssl.SSLError):  # OpenSSL would wait here until the peer ends too.
                self._tls.unwrap()
            self._plain.send(self._outgoing.read(), socket.MSG_DONTWAIT)
            self._plain.shutdown(socket.SHUT_WR)

    def finish(self, seconds: float) -> None:
        """Ends sending, then waits at most `seconds` until the peer has read everything and closes. Only the thread
        that receives may call this.

        A socket that is closed with unread input discards what it has sent, so this reads and drops input that still
        comes.
        """
        self.end_sending()
        give_up_at = time.monotonic() + seconds
        with contextlib.suppress(OSError, ValueError):
            while (left := give_up_at - time.monotonic()) > 0:
                if self._poll(select.POLLIN, left) and not self._plain.recv_into(self._raw):
                    return

    def close(self) -> None:
        """Ends the connection at once and wakes the threads that wait. Any thread may call this, more than once."""
        self._is_closed = True
        # Without the lock, `release` might have closed the socket, and its descriptor might be another connection's.
        with self._end_lock, contextlib.suppress(OSError):
            if os.getpid() == self._pid:  # A child's copy of the socket is not the child's to shut down.
                self._plain.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Closes the socket, after `close`. The receiving thread calls this, or any thread once none receives."""
        self.close()
        with self._send_lock, self._end_lock:
            self._plain.close()
