"""Decides which callers are admitted: checks a certificate that TLS has verified against the registry of tenants and
shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from provider.identity.authority import Role, peer_identity
from provider.identity.registry import RevocationList
from provider.schedule.quota import LOCAL_TENANT
from wire.errors import REVOKED, NotPermitted, Unauthenticated, Unavailable, WireCode


@dataclass(frozen=True)
class Access:
    """The caller. `refusal` is asked again on every request, and raises `RegistryUnreadable` where the registry cannot
    be read."""

    tenant: str
    refusal: Callable[[], WireCode | None]

    def may_stay(self) -> bool:
        """Tells whether the registry says that the caller may go on; where it cannot be read, it does not say so.

        This is for shards, which come again by themselves. A tenant's stream asks `refusal`, and goes on meanwhile.
        """
        try:
            return self.refusal() is None
        except Unavailable:
            return False


class AccessCheck:
    """Identifies callers."""

    def __init__(self, revocations: RevocationList | None) -> None:
        """Args: revocations: the registry; None on a loopback port without TLS, where every caller is the local
        tenant."""
        self._revocations = revocations

    def admit(self, cert_pem: bytes, role: Role = "tenant") -> Access:
        """Returns the caller's access.

        Args:
            cert_pem: a certificate that TLS has verified; empty without TLS.
            role: the role that the caller claims.

        Raises:
            Unauthenticated: the certificate is not of this role, or not this provider's.
            NotPermitted: it was revoked.
            RegistryUnreadable: the registry cannot be read just now.
        """
        if self._revocations is None:
            return Access(LOCAL_TENANT, lambda: None)
        peer = peer_identity(cert_pem, role)
        self._revocations.check_current()
        access = Access(peer.name, lambda: self._refusal(peer.serial))
        code = access.refusal()
        if code is WireCode.NOT_PERMITTED:
            raise NotPermitted(REVOKED)
        if code is not None:
            raise Unauthenticated("not enrolled")
        return access

    def _refusal(self, serial: int) -> WireCode | None:
        if self._revocations is None or self._revocations.is_enrolled(serial):
            return None
        revoked = self._revocations.is_revoked(serial)
        return WireCode.NOT_PERMITTED if revoked else WireCode.UNAUTHENTICATED
