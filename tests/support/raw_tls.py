"""Implements a tenant on the tensor port that can also send bytes that form no message."""

from __future__ import annotations

from tests.support.loopback_provider import Provider
from tests.support.raw_peer import RawPeer
from tests.support.tensor_port import dial
from wire.transport.tls import TlsSocket, client_context


class RawTls(RawPeer):
    """Sends messages by `connection`, as any tenant does, and arbitrary bytes by `send` or `records`."""

    def __init__(self, provider: Provider, name: str) -> None:
        identity = provider.identity(name)
        context = client_context(identity.ca_pem, identity.cert_pem, identity.key_pem)
        super().__init__(dial(provider), context, "127.0.0.1")
        self.shake_hands()
        self.send()
        self.connection = TlsSocket(self.plain, self.tls, self.incoming, self.outgoing)
