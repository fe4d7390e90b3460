"""Reads the folder that `provider enroll` made: key.pem, cert.pem, ca.pem, endpoint."""

from __future__ import annotations

import stat
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from wire.errors import ConfigurationError, Unauthenticated
from wire.transport.grpc_client import TlsIdentity


def load_identity(folder: str | Path) -> TlsIdentity:
    """Loads a tenant's identity.

    Args:
        folder: as given to `provider enroll NAME --out FOLDER`.

    Raises:
        ConfigurationError: a file is missing or unreadable, or the key is open to other users.
        Unauthenticated: the certificate has expired.
    """
    folder = Path(folder)
    try:
        ca_pem, cert_pem, key_pem = ((folder / name).read_bytes() for name in ("ca.pem", "cert.pem", "key.pem"))
        mode = stat.S_IMODE((folder / "key.pem").stat().st_mode)
    except OSError as exc:
        raise ConfigurationError(
            f"{folder} is not a tenant identity ({exc.strerror}): make one with `provider enroll NAME --out {folder}`"
        ) from None
    if mode & 0o077:
        raise ConfigurationError(f"{folder / 'key.pem'} can be read by other users: chmod 600 it")
    try:
        expires_at = x509.load_pem_x509_certificate(cert_pem).not_valid_after_utc
    except ValueError:
        raise ConfigurationError(f"{folder / 'cert.pem'} is not a certificate: enrol again") from None
    if expires_at < datetime.now(UTC):
        raise Unauthenticated(f"the certificate in {folder} expired on {expires_at:%Y-%m-%d}: enrol again")
    return TlsIdentity(ca_pem, cert_pem, key_pem)


def read_endpoint(folder: str | Path) -> str:
    """The URL that the operator wrote next to the certificate."""
    try:
        return (Path(folder) / "endpoint").read_text(encoding="utf-8").strip()
    except OSError:
        raise ConfigurationError(f"{folder} names no endpoint: give the provider's URL") from None


def tenant_name(identity: TlsIdentity) -> str:
    """The name in the certificate's alternative name, `veilbase://tenant/NAME` (SPEC.md, section 1).

    Raises:
        ConfigurationError: a certificate without it.
    """
    try:
        certificate = x509.load_pem_x509_certificate(identity.cert_pem)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return names.get_values_for_type(x509.UniformResourceIdentifier)[0].removeprefix("veilbase://tenant/")
    except (ValueError, IndexError, x509.ExtensionNotFound):
        raise ConfigurationError("the identity's certificate names no tenant: enrol again") from None
