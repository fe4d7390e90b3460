"""Makes certificate authorities, and identities that a provider accepts or must refuse, and checks certificates and
errors."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from cryptography import x509

import provider.identity.registry as registry
from provider.identity.authority import StateDir, current_time, issue_server_certificate
from provider.identity.registry import enroll
from tests.support.providers import Provider
from wire.errors import AccessError
from wire.transport.identity import TlsIdentity
from wire.transport.tls import client_context, server_context

ENDPOINT = "grpcs://localhost:8443"
"""The provider's URL in certificates. Nothing listens there."""


def certificate_in(folder: Path) -> x509.Certificate:
    """Returns the certificate in a tenant's folder."""
    return x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())


def assert_one_line(exc: BaseException) -> None:
    """Checks that an error is an AccessError whose message is one line and shows no key."""
    assert "\n" not in str(exc)
    assert "PRIVATE" not in str(exc)
    assert isinstance(exc, AccessError)


def serial_of(record: registry.TenantRecord) -> int:
    """Returns the serial number of a tenant's certificate."""
    return int(record.serial, 16)


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


def foreign_identity(tmp_path: Path, provider: Provider) -> TlsIdentity:
    """Returns an identity with the same name from another certificate authority."""
    other = StateDir(tmp_path / "foreign")
    enroll(other, "acme", tmp_path / "foreign-acme", provider.url)
    theirs = TlsIdentity.read(tmp_path / "foreign-acme")
    return TlsIdentity(provider.state.ca.pem, theirs.cert_pem, theirs.key_pem)


def expired_identity(tmp_path: Path, provider: Provider) -> TlsIdentity:
    """Returns an identity whose certificate has expired."""
    long_ago = current_time() - timedelta(days=30)
    enroll(provider.state, "late", tmp_path / "late", provider.url, days=1, now=long_ago)
    return TlsIdentity.read(tmp_path / "late")


def unregistered_identity(tmp_path: Path, provider: Provider) -> TlsIdentity:
    """Returns an identity that the provider's authority signed but that is not in the registry, as a crash could leave
    one."""
    enroll(provider.state, "ghost", tmp_path / "ghost", provider.url)
    provider.state.tenants_path.write_text("[]\n")
    return TlsIdentity.read(tmp_path / "ghost")
