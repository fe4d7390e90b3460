"""This module reads the folder that `provider enroll` makes: ca.pem, cert.pem and key.pem of a tenant."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from wire.errors import ConfigurationError, Unauthenticated


@dataclass(frozen=True)
class TlsIdentity:
    """Holds the PEM bytes of an identity: the CA's certificate, and the identity's certificate and private key. `repr`
    shows none of them."""

    ca_pem: bytes
    cert_pem: bytes
    key_pem: bytes

    def __repr__(self) -> str:
        """Returns a text without the key."""
        return "TlsIdentity(...)"

    @classmethod
    def read(cls, folder: Path) -> TlsIdentity:
        """Reads the three files without checking their contents; `load_identity` also checks them.

        Raises:
            OSError: one of the files cannot be read.
        """
        ca_pem, cert_pem, key_pem = ((folder / name).read_bytes() for name in ("ca.pem", "cert.pem", "key.pem"))
        return cls(ca_pem, cert_pem, key_pem)


def load_identity(folder: str | Path, kind: str = "") -> TlsIdentity:
    """Reads an identity and checks that it can be used.

    Args:
        folder: the folder that was given as FOLDER to `provider enroll NAME --out FOLDER`.
        kind: an option that the error's advice adds to `provider enroll NAME`; "" for none.

    Raises:
        ConfigurationError: a file is missing, unreadable or does not hold what its name says, or the key is open to
            other users.
        Unauthenticated: the certificate has expired.
    """
    folder = Path(folder)
    try:
        identity = TlsIdentity.read(folder)
        mode = stat.S_IMODE((folder / "key.pem").stat().st_mode)
    except OSError as exc:
        command = " ".join(["provider enroll NAME", *([kind] if kind else []), f"--out {folder}"])
        raise ConfigurationError(f"{folder} is not an identity ({exc.strerror}): make one with `{command}`") from exc
    if mode & 0o077:
        raise ConfigurationError(f"{folder / 'key.pem'} can be read by other users: chmod 600 it")
    expires_at = _check_files(folder, identity).not_valid_after_utc
    if expires_at < datetime.now(UTC):
        raise Unauthenticated(f"the certificate in {folder} expired on {expires_at:%Y-%m-%d}: enrol again")
    return identity


def _check_files(folder: Path, identity: TlsIdentity) -> x509.Certificate:
    """Checks all three files and returns the certificate in cert.pem; raises ConfigurationError if a file does not hold
    what its name says. The TLS libraries would not say which file is at fault."""
    for name, pem in (("ca.pem", identity.ca_pem), ("cert.pem", identity.cert_pem)):
        try:
            certificate = x509.load_pem_x509_certificate(pem)
        except ValueError as exc:
            raise ConfigurationError(f"{folder / name} is not a certificate: enrol again") from exc
    try:
        key = serialization.load_pem_private_key(identity.key_pem, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # `from None`: the original error is about a secret.
        raise ConfigurationError(f"{folder / 'key.pem'} is not a private key: enrol again") from None
    if key.public_key() != certificate.public_key():
        raise ConfigurationError(f"{folder / 'key.pem'} does not belong to cert.pem beside it: enrol again")
    return certificate
