"""This module sends messages unencrypted over a socket of this host, once both ends have proved who they are
(`handshake`). A large message is received straight into its own memory.

Guarantees: those of `message_socket`. The kernel delivers the bytes between the two processes and to nobody else. This
module does not check who the peer is.
"""

from __future__ import annotations

import contextlib
import socket

from wire.transport.message_socket import LENGTH, MessageSocket

END_OF_MESSAGES = 0xFFFF_FFFF
"""The length that says that no more messages come. Without it an end could not be told from a peer that was killed."""


class ClearSocket(MessageSocket):
    """Carries messages unencrypted; see `MessageSocket`."""

    FIRST_BYTES = (1 << 15) - LENGTH.size
    PIECE_BYTES = 1 << 30  # The kernel takes all of a message at once, or as much as it has room for.

    def __init__(self, plain: socket.socket, certificate: bytes, busy_poll_s: float = 0.0) -> None:
        """Takes a socket on which both ends have said `clear`.

        Args:
            plain: the socket; no other code may use it from now on.
            certificate: the peer's certificate in DER, which TLS has verified on this socket.
            busy_poll_s: see `MessageSocket`.
        """
        super().__init__(plain, busy_poll_s)
        self._certificate = certificate

    def peer_certificate(self) -> bytes:
        """Returns the certificate that the peer showed in the handshake, in DER."""
        return self._certificate

    def _piece_to_send(self, plain: bytes | memoryview) -> memoryview:
        return memoryview(plain)

    def _receive_some(self, flags: int) -> int:
        if self._body is None:
            return self._plain.recv_into(self._small[self._held :], 0, flags)
        # A thread that waits anyway is woken once, and not for each part that the kernel hands over.
        return self._plain.recv_into(self._body[self._filled :], 0, flags or socket.MSG_WAITALL)

    def _take_in(self, count: int) -> None:
        if self._body is None:
            self._held += count
            self._split()
        else:
            self._filled += count
            self._end_body()

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
