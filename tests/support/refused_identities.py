"""Makes identities that a provider must refuse."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from provider.identity.authority import StateDir, current_time
from provider.identity.registry import enroll
from tests.support.loopback_provider import Provider
from wire.transport.identity import TlsIdentity


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
