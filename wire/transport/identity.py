"""The folder that `provider enroll` makes: ca.pem, cert.pem and key.pem of a tenant, or of a shard's host."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from wire.errors import ConfigurationError, Unauthenticated


@dataclass(frozen=True)
class TlsIdentity:
    """PEM bytes of an identity; the key never leaves this object and is not shown by repr."""

    ca_pem: bytes
    cert_pem: bytes
    key_pem: bytes

    def __repr__(self) -> str:
        """Hides the key."""
        return "TlsIdentity(...)"

    @classmethod
    def read(cls, folder: Path) -> TlsIdentity:
        """The three files as they are; `load_identity` also looks at what is in them.

        Raises:
            OSError: one cannot be read.
        """
        ca_pem, cert_pem, key_pem = ((folder / name).read_bytes() for name in ("ca.pem", "cert.pem", "key.pem"))
        return cls(ca_pem, cert_pem, key_pem)


def load_identity(folder: str | Path, kind: str = "") -> TlsIdentity:
    """Reads an identity and checks that it can be used.

    Args:
        folder: as given to `provider enroll NAME --out FOLDER`.
        kind: the option of `provider enroll` that makes one of this kind.

    Raises:
        ConfigurationError: a file is missing or unreadable, or the key is open to other users.
        Unauthenticated: the certificate has expired.
    """
    folder = Path(folder)
    try:
        identity = TlsIdentity.read(folder)
        mode = stat.S_IMODE((folder / "key.pem").stat().st_mode)
    except OSError as exc:
        command = " ".join(["provider enroll NAME", *([kind] if kind else []), f"--out {folder}"])
        raise ConfigurationError(f"{folder} is not an identity ({exc.strerror}): make one with `{command}`") from None
    if mode & 0o077:
        raise ConfigurationError(f"{folder / 'key.pem'} can be read by other users: chmod 600 it")
    try:
        expires_at = x509.load_pem_x509_certificate(identity.cert_pem).not_valid_after_utc
    except ValueError:
        raise ConfigurationError(f"{folder / 'cert.pem'} is not a certificate: enrol again") from None
    if expires_at < datetime.now(UTC):
        raise Unauthenticated(f"the certificate in {folder} expired on {expires_at:%Y-%m-%d}: enrol again")
    return identity
