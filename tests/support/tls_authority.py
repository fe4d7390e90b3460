"""Makes a certificate authority with one provider and one tenant, for tests that connect without a server."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from provider.identity.authority import StateDir, issue_server_certificate
from provider.identity.registry import enroll
from wire.transport.identity import TlsIdentity
from wire.transport.tls import client_context, server_context

HOST = "127.0.0.1"


@dataclass
class Authority:
    """Holds, for each side, the CA's certificate, the side's own certificate, and its key."""

    server: tuple[bytes, bytes, bytes]
    client: tuple[bytes, bytes, bytes]

    def server_context(self) -> ssl.SSLContext:
        """Returns the provider's TLS context."""
        return server_context(*self.server)

    def client_context(self) -> ssl.SSLContext:
        """Returns the tenant's TLS context."""
        return client_context(*self.client)


def make_authority(folder: Path) -> Authority:
    """Makes an authority whose files are in a folder."""
    state = StateDir(folder / "state")
    key, chain, ca = issue_server_certificate(state, HOST)
    enroll(state, "acme", folder / "acme", f"grpcs://{HOST}:1")
    tenant = TlsIdentity.read(folder / "acme")
    return Authority((ca, chain, key), (tenant.ca_pem, tenant.cert_pem, tenant.key_pem))
