"""This module sends messages unencrypted over a Unix socket, once both ends have proved who they are
(wire/transport/ipc/handshake.py). A large message is received straight into its own memory.

Guarantees: those of `message_socket`. The kernel delivers the bytes between the two processes and to nobody else. This
module does not check who the peer is.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time

from wire.errors import MalformedFrame
from wire.transport.message_socket import LENGTH, MessageSocket

END_OF_MESSAGES = 0xFFFF_FFFF
"""The length that says that no more messages come. Without it, a peer that was killed would look like a peer that has
ended the connection properly."""

_MOST_BYTES_BESIDE = 4096
"""The most bytes of a message that may come with a file descriptor."""
_SEND_BYTES = 1 << 20
"""The size of the send buffer, in bytes, that is requested from the kernel, which grants up to net.core.wmem_max. The
larger the buffer, the less often the two ends wake each other during a large message."""


class ClearSocket(MessageSocket):
    """Carries messages unencrypted; see `MessageSocket`."""

    FIRST_BYTES = (1 << 15) - LENGTH.size
    NEXT_BYTES = 1 << 30  # The kernel takes all of a message at once, or as much as it has room for.

    def __init__(self, plain: socket.socket, certificate: bytes, busy_poll_s: float = 0.0) -> None:
        """Takes a socket on which both ends have sent `clear`, the last message of the handshake.

        Args:
            plain: the socket; no other code may use it from now on.
            certificate: the peer's certificate in DER, which TLS has verified on this socket.
            busy_poll_s: see `MessageSocket`.
        """
        super().__init__(plain, busy_poll_s)
        self._certificate = certificate
        with contextlib.suppress(OSError):
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)

    def peer_certificate(self) -> bytes:
        return self._certificate

    def send(self, message: bytes | memoryview) -> None:
        """Queues a message and sends at once as many bytes as the connection takes; see `MessageSocket.send`.

        If no other message waits to be sent, a small message goes to the kernel without being queued. This saves time,
        since most of a small message's time is spent in this process.
        """
        if len(message) > self.FIRST_BYTES or not self._send_lock.acquire(False):
            return super().send(message)
        try:
            if self._is_closed or self._unsent or self._going or self._begun or os.getpid() != self._pid:
                self._unsent.append(message)
            else:
                data = LENGTH.pack(len(message)) + message
                sent = self._plain.send(data, socket.MSG_DONTWAIT)
                if sent < len(data):
                    self._going = memoryview(data)[sent:]
        except BlockingIOError:
            self._unsent.append(message)
        finally:
            self._send_lock.release()
        self._has_sent = True
        if self._unsent or self._going:
            self.flush()
        return None

    # ---- descriptors ------------------------------------------------------------------------------------------------

    def send_with_descriptor(self, message: bytes, descriptor: int) -> None:
        """Sends a small message, and a file descriptor with it. Nothing else may wait to be sent.

        Raises:
            OSError: the connection is broken, or takes no bytes at the moment.
        """
        self._check_process()
        data = LENGTH.pack(len(message)) + message
        with self._send_lock:
            if self.has_unsent or socket.send_fds(self._plain, [data], [descriptor], socket.MSG_DONTWAIT) < len(data):
                raise ConnectionError("the connection takes no message with a descriptor")

    def receive_with_descriptor(self, give_up_at_s: float) -> tuple[bytes, int | None]:
        """Waits for a small message that may have a file descriptor with it. Nothing may have been received since the
        last whole message.

        Args:
            give_up_at_s: when to stop waiting, on `time.monotonic`'s clock.

        Returns:
            The message, and the descriptor, which the caller closes, or None.

        Raises:
            TimeoutError: nothing came in time.
            MalformedFrame: the message is larger than 4 KiB, or came with several descriptors.
            OSError: the connection is broken or closed, or the peer has said that it sends no more messages.
        """
        self._check_process()
        descriptors: list[int] = []
        try:
            prefix = self._receive_exactly(LENGTH.size, give_up_at_s, descriptors)
            (length,) = LENGTH.unpack(prefix)
            if length == END_OF_MESSAGES:
                raise ConnectionError("the peer sends no message")
            if length > _MOST_BYTES_BESIDE or self._held or len(descriptors) > 1:
                raise MalformedFrame("expected a small message with at most one descriptor")
            return self._receive_exactly(length, give_up_at_s, None), descriptors[0] if descriptors else None
        except BaseException:
            for one in descriptors:
                os.close(one)
            raise

    def _receive_exactly(self, num_bytes: int, give_up_at_s: float, descriptors: list[int] | None) -> bytes:
        """Receives so many bytes and no more, since other messages may follow. Adds the descriptors that come with them
        to a list; without one, the kernel closes them. See `receive_with_descriptor` for errors."""
        data = b""
        while len(data) < num_bytes:
            if not self._poll(select.POLLIN, give_up_at_s - time.monotonic()):
                raise TimeoutError("no message came in time")
            with contextlib.suppress(BlockingIOError):
                if descriptors is None:
                    part = self._plain.recv(num_bytes - len(data), socket.MSG_DONTWAIT)
                else:
                    part, came, flags, _ = socket.recv_fds(
                        self._plain, num_bytes - len(data), 1, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
                    )
                    descriptors += came
                    if flags & socket.MSG_CTRUNC:
                        raise MalformedFrame("expected at most one descriptor")
                if not part:
                    raise ConnectionError("the peer closed the connection")
                data += part
        return data

    def _as_sent(self, plain: bytes | memoryview) -> memoryview:
        return memoryview(plain)

    def _receive_some(self, flags: int) -> int:
        if self._body is None:
            return self._plain.recv_into(self._small[self._held :] if self._held else self._small, 0, flags)
        # A thread that waits anyway is woken once, and not for each part that the kernel hands over.
        return self._plain.recv_into(self._body[self._filled :], 0, flags or socket.MSG_WAITALL)

    def _take_in(self, count: int) -> None:
        if self._body is not None:
            self._filled += count
            self._end_body()
        elif not self._held and count >= LENGTH.size and LENGTH.unpack_from(self._small)[0] == count - LENGTH.size:
            # One small message has come, and nothing else: it needs no search for where it ends.
            self._messages.append(memoryview(bytearray(self._small[LENGTH.size : count])))
        else:
            self._held += count
            self._split()

    def _take_long(self, length: int) -> None:
        if length != END_OF_MESSAGES:
            super()._take_long(length)
        self._has_ended = True
        raise EOFError

    def end_sending(self) -> None:
        """Tells the peer that no more messages come. Callers must first flush what was queued."""
        self._check_process()
        with self._send_lock, contextlib.suppress(OSError):
            self._plain.send(LENGTH.pack(END_OF_MESSAGES), socket.MSG_DONTWAIT)
            self._plain.shutdown(socket.SHUT_WR)
