"""Decides which callers are admitted: looks up each caller's certificate in the registry.

Callers of this module must pass only certificates that TLS has verified.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from provider.identity.authority import peer_identity
from provider.identity.revocations import RevocationList
from provider.schedule.quota import LOCAL_TENANT
from wire.errors import REVOKED, NotPermitted, Unauthenticated, WireCode


@dataclass(frozen=True)
class Access:
    """Holds an admitted caller's name, and a check, made for every request, that the caller is still admitted.

    Attributes:
        tenant: the name of the tenant.
        refusal: returns None if the caller is still admitted, else the error code; raises `RegistryUnreadable` if the
            registry has been unreadable, or a copy of it has not been renewed, for too long.
    """

    tenant: str
    refusal: Callable[[], WireCode | None]


class AccessCheck:
    """Identifies callers by their certificates, and admits or refuses them."""

    def __init__(self, revocations: RevocationList | None) -> None:
        """Keeps `revocations`, the registry. None is for a loopback port without TLS: every caller is then the tenant
        `local`."""
        self._revocations = revocations

    def admit(self, cert_pem: bytes) -> Access:
        """Checks a caller's certificate and admits the caller.

        Args:
            cert_pem: the caller's certificate in PEM, which TLS has verified; empty without TLS.

        Returns:
            The caller's name, and the check for later requests.

        Raises:
            Unauthenticated: the certificate is not a tenant's, or is not registered.
            NotPermitted: the certificate was revoked.
            RegistryUnreadable: the registry cannot be read at present, or is a copy that is too old.
        """
        if self._revocations is None:
            return Access(LOCAL_TENANT, lambda: None)
        peer = peer_identity(cert_pem)
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
