"""Implements one end of a TLS connection with the standard library only, so that a test decides where the bytes are
cut."""

from __future__ import annotations

import contextlib
import socket
import ssl


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
