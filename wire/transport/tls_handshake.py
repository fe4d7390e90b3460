"""This module does the TLS handshake on a connected socket, whatever the socket's family is.

Guarantees: the handshake, and all messages of `say` and `hear`, have one deadline together. A peer that sends a byte
now and then does not extend this deadline. The peer speaks the application protocol that this end expects.
"""

from __future__ import annotations

import socket
import ssl
import time
from dataclasses import dataclass

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
