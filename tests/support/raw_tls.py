"""A tenant on the tensor port that can also send bytes which are no messages."""

from __future__ import annotations

import ssl

from tests.support.loopback_provider import Provider
from tests.support.tensor_port import dial
from wire.transport.tls_context import client_context
from wire.transport.tls_socket import MessageSocket


class RawTls:
    """Makes the handshake itself, and so holds what encrypts; messages go by `connection`, as from any tenant."""

    def __init__(self, provider: Provider, name: str) -> None:
        identity = provider.identity(name)
        context = client_context(identity.ca_pem, identity.cert_pem, identity.key_pem)
        incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(incoming, self._outgoing, server_hostname="127.0.0.1")
        self.plain = dial(provider)
        while not self._has_shaken_hands():
            self.plain.sendall(self._outgoing.read())
            data = self.plain.recv(1 << 16)
            assert data, "the provider ended the handshake"
            incoming.write(data)
        self.plain.sendall(self._outgoing.read())
        self.connection = MessageSocket(self.plain, self._tls, incoming, self._outgoing)

    def _has_shaken_hands(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def encrypted(self, data: bytes) -> bytes:
        """Returns the TLS records that carry these bytes; they have to be sent before anything else is."""
        self._tls.write(data)
        return self._outgoing.read()

    def send(self, data: bytes) -> None:
        """Sends these bytes, whether or not they are a message."""
        self.plain.sendall(self.encrypted(data))
