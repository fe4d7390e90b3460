"""One end of a TLS connection by the standard library alone: it cuts what it sends wherever a test likes."""

from __future__ import annotations

import contextlib
import socket
import ssl


class RawPeer:
    """A tenant's end, or a provider's where no host is named."""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext, host: str | None = None) -> None:
        """Args: plain: a connected socket; context: the TLS context of this end; host: whom a tenant means."""
        self.plain = plain
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=host is None, server_hostname=host)

    def shake_hands(self) -> None:
        """Makes the connection; this end's last words wait for the next `send`."""
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                self.tls.do_handshake()
                return
            self.send()
            self._take()

    def records(self, *parts: bytes) -> bytes:
        """Encrypts each part, in a record of its own if it is small, and returns all that waits to be sent."""
        for part in parts:
            self.tls.write(part)
        return self.outgoing.read()

    def send(self, *parts: bytes) -> None:
        """Sends what waits, and these parts."""
        self.plain.sendall(self.records(*parts))

    def end(self) -> None:
        """Says that nothing more comes; the words wait for the next `send`."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self.tls.unwrap()

    def receive(self, num_bytes: int) -> bytes:
        """Waits for so many bytes."""
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
