"""This module sends messages over one connected socket, each with its length in front (wire/SPEC.md, section 1). What
crosses the socket, encrypted or not, is up to a subclass: `tls_socket.TlsSocket` or `ipc.clear_socket.ClearSocket`.

Guarantees: a message's length is checked before memory is allocated for the message. `send`, `receive` and `close` may
run at the same time in different threads, but only one thread at a time may run `receive`. No thread holds a lock while
it waits for the peer. This module does not know what messages mean.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque

from wire.errors import ForkedConnection, MalformedFrame
from wire.limits import MAX_FRAME_BYTES
from wire.ring.buffers import unwritten
from wire.transport.busy_poll import SMALL_BYTES, BusyPoll

LENGTH = struct.Struct("<I")
_SMALL_BUFFER_BYTES = 1 << 15
"""How many bytes are received into memory that all messages share. The beginning of a large message is copied out of
it; the rest is received into the message's own memory."""
NOTHING = memoryview(b"")
"""An empty view that keeps no memory alive. It replaces an empty slice of a message, which would keep the whole message
alive."""


class MessageSocket(ABC):
    """Carries messages on a connection after its handshake. The receiving thread calls `next_message` until that
    returns None, then `wait`."""

    FIRST_BYTES: int
    """How many bytes of a message are joined with its length prefix. They are copied for this; copying all of a large
    message would cost more."""
    NEXT_BYTES: int
    """How many further bytes of a large message are handed to `_as_sent` at a time."""

    def __init__(self, plain: socket.socket, busy_poll_s: float = 0.0) -> None:
        """Takes a connected socket, which no other code may use from now on.

        Args:
            plain: the socket, after its handshake.
            busy_poll_s: for how many seconds `wait` polls for a reply before it sleeps.
        """
        plain.setblocking(True)  # `receive(0)` blocks until messages come; every other call passes MSG_DONTWAIT.
        self._plain = plain
        self._send_lock = threading.Lock()
        self._unsent: deque[bytes | memoryview] = deque()
        self._begun: memoryview = NOTHING
        """The rest of a large message that has not been handed to `_as_sent` yet."""
        self._going: memoryview = NOTHING
        """The bytes that go to the kernel next: what is left of the last result of `_as_sent`."""
        self._blocked_at_s: float | None = None
        self._end_lock = threading.Lock()
        self._pid = os.getpid()
        self._is_closed = self._has_ended = False
        self._fault: str | None = None
        """The error text if the peer sent malformed bytes, else None. The exception itself is not kept, since its
        traceback would hold this object in a reference cycle."""
        self._small = memoryview(bytearray(_SMALL_BUFFER_BYTES))
        self._held = 0
        """How many bytes in the small buffer `_small` belong to no complete message yet."""
        self._body: memoryview | None = None
        self._filled = 0
        self._messages: deque[bytes | memoryview] = deque()
        self._busy_poll, self._readable = BusyPoll(busy_poll_s), select.poll()
        self._readable.register(plain, select.POLLIN)
        self._has_sent = False
        """Tells whether this end has sent anything since the last wait. If it has not, polling does not pay."""
        self.took_little = True
        """Tells whether the last message that `next_message` returned was small."""

    @abstractmethod
    def peer_certificate(self) -> bytes:
        """Returns the peer's certificate in DER; its chain and dates have been verified."""

    @abstractmethod
    def _as_sent(self, plain: bytes | memoryview) -> memoryview:
        """Returns the bytes to send for `plain`, the next bytes of the messages: encrypted, or as they are."""

    @abstractmethod
    def _receive_some(self, flags: int) -> int:
        """Receives bytes from the socket once; returns how many, 0 at the end. Raises BlockingIOError if none have come
        and `flags` says not to wait."""

    @abstractmethod
    def _take_in(self, count: int) -> None:
        """Makes messages out of the bytes that `_receive_some` has received; see `wait` for errors."""

    @abstractmethod
    def end_sending(self) -> None:
        """Tells the peer that no more messages come. Callers must first flush what was queued."""

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
        return bool(self._unsent or self._going or self._begun)

    def flush(self) -> None:
        """Sends at once as many queued bytes as the connection takes; see `send` for errors."""
        self._check_process()
        with self._send_lock:
            if self._is_closed:
                raise ConnectionError("the connection was closed")
            while self.has_unsent:
                if not self._going:
                    self._going = self._as_sent(self._next_bytes())
                try:
                    sent = self._plain.send(self._going, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    self._blocked_at_s = self._blocked_at_s or time.monotonic()
                    return
                self._blocked_at_s = None
                self._going = self._going[sent:] or NOTHING

    def _next_bytes(self) -> bytes | memoryview:
        if self._begun:
            following, self._begun = self._begun[: self.NEXT_BYTES], self._begun[self.NEXT_BYTES :] or NOTHING
            return following
        message = memoryview(self._unsent.popleft())
        self._begun = message[self.FIRST_BYTES :] or NOTHING
        return b"".join((LENGTH.pack(len(message)), message[: self.FIRST_BYTES]))

    def blocked_s(self) -> float:
        """Returns for how many seconds the connection has taken no bytes, because the peer does not read; 0 if the last
        attempt to send was not blocked."""
        blocked_at_s = self._blocked_at_s
        return 0.0 if blocked_at_s is None else time.monotonic() - blocked_at_s

    def wait_to_send(self, seconds: float) -> None:
        """Waits at most `seconds` until the connection takes more bytes, then flushes. This method is for a thread that
        does not receive."""
        with contextlib.suppress(ConnectionError):  # The connection was closed meanwhile, and `flush` says so.
            self._poll(select.POLLOUT, seconds)
        self.flush()

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
            ForkedConnection: this is a child of the process that opened the connection.
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
        events = self._poll(select.POLLIN | select.POLLOUT)
        if events & select.POLLOUT:
            self.flush()
        if events & ~select.POLLOUT:
            self.receive()

    def peek(self, give_up_at_s: float) -> bytes | memoryview:
        """Waits for a message and returns it; `next_message` then returns the same message. Only the thread that
        receives may call this.

        Args:
            give_up_at_s: when to stop waiting, on `time.monotonic`'s clock.

        Raises:
            TimeoutError: no whole message came in time.
            EOFError, ForkedConnection, MalformedFrame, OSError: see `wait`.
        """
        while not self._messages:
            left = give_up_at_s - time.monotonic()
            if left <= 0:
                raise TimeoutError("no message came in time")
            if self._has_ended:
                self.receive()  # This raises how the messages ended.
            wanted = select.POLLIN | (select.POLLOUT if self.has_unsent else 0)
            events = self._poll(wanted, left)
            if events & select.POLLOUT:
                self.flush()
            if events & ~select.POLLOUT:
                try:
                    self.receive()
                except (EOFError, MalformedFrame):
                    if not self._messages:  # Otherwise the end came with a message, and is raised again after it.
                        raise
        return self._messages[0]

    def _is_readable(self) -> object:
        return self._readable.poll(0)

    def _poll(self, wanted: int, seconds: float | None = None) -> int:
        poll = select.poll()
        try:
            poll.register(self._plain, wanted)
        except ValueError:  # it has no descriptor any more
            raise ConnectionError("the connection was closed") from None
        ready = poll.poll(None if seconds is None else max(0, 1000 * seconds))
        return ready[0][1] if ready else 0

    def receive(self, flags: int = socket.MSG_DONTWAIT) -> None:
        """Receives the bytes that have come; waits for bytes only if `flags` is 0. See `wait` for errors."""
        self._check_process()
        if self._has_ended:
            raise EOFError if self._fault is None else MalformedFrame(self._fault)
        try:
            count = self._receive_some(flags)
        except BlockingIOError:
            return
        if not count:
            raise ConnectionError("the peer closed the connection")
        self._take_in(count)

    def _check_process(self) -> None:
        """Raises ForkedConnection in a forked child. Parent and child would encrypt with the same keys and counters, so
        an eavesdropper could compare the two ciphertexts and read them; and both would draw the same masks."""
        if os.getpid() != self._pid:
            raise ForkedConnection("this connection was opened before a fork: open a new one in the child")

    def _split(self) -> None:
        """Takes the messages out of the small buffer. The beginning of a large message is copied into memory of its
        own."""
        held, start = self._small[: self._held], 0
        while len(held) - start >= LENGTH.size:
            (length,) = LENGTH.unpack_from(held, start)
            if length > MAX_FRAME_BYTES:
                self._take_long(length)
            start += LENGTH.size
            here = held[start : start + length]
            if len(here) == length:
                self._messages.append(memoryview(bytearray(here)))
            else:
                self._body, self._filled = unwritten(length), len(here)
                self._body[: len(here)] = here
            start += len(here)
        self._held = len(held) - start
        self._small[: self._held] = held[start:]

    def _take_long(self, length: int) -> None:
        """Ends receiving, since the peer announced `length`, which no message may have."""
        self._has_ended = True
        self._fault = f"expected a message of at most {MAX_FRAME_BYTES} bytes, got {length}"
        raise MalformedFrame(self._fault)

    def _end_body(self) -> None:
        if self._body is not None and self._filled == len(self._body):
            self._messages.append(self._body)
            self._body = None

    # ---- ending -----------------------------------------------------------------------------------------------------

    def finish(self, seconds: float) -> None:
        """Ends sending, then waits at most `seconds` until the peer has read everything and closes. Only the thread
        that receives may call this.

        A socket that is closed with unread input discards what it has sent, so this reads and drops input that still
        comes.
        """
        self.end_sending()
        give_up_at = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            while (left := give_up_at - time.monotonic()) > 0:
                if self._poll(select.POLLIN, left) and not self._plain.recv_into(self._small):
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
