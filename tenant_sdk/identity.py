"""This module reads the provider's URL, the provider's authority and the tenant's name from a tenant's identity
folder."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from wire.errors import ConfigurationError
from wire.transport.identity import TlsIdentity, load_identity


def read_endpoint(folder: str | Path) -> str:
    """Returns the provider's URL, which `provider enroll` wrote next to the certificate.

    Raises:
        ConfigurationError: the folder names no endpoint.
    """
    try:
        url = (Path(folder) / "endpoint").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigurationError(f"{folder} names no endpoint: give the provider's URL") from exc
    if not url:
        raise ConfigurationError(f"{folder} names no endpoint: give the provider's URL")
    return url


def endpoints_of(folders: Sequence[str | Path]) -> list[str]:
    """Returns the URL of each identity's provider, for a tenant that names no URL.

    Raises:
        ConfigurationError: a folder is no identity or names no endpoint. The former is said first, since a wrong folder
            is a likelier mistake than a missing endpoint.
        Unauthenticated: a certificate has expired.
    """
    for folder in folders:
        load_identity(folder)
    return [read_endpoint(folder) for folder in folders]


def issuer_of(identity: TlsIdentity) -> bytes:
    """Returns the SHA-256 of the public key of the provider's certificate authority, which tells one provider from
    another.

    Raises:
        ConfigurationError: ca.pem holds no certificate.
    """
    try:
        key = x509.load_pem_x509_certificate(identity.ca_pem).public_key()
    except ValueError as exc:
        raise ConfigurationError("the identity's ca.pem is not a certificate: enrol again") from exc
    spki = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spki).digest()


def tenant_name(identity: TlsIdentity) -> str:
    """Returns the tenant's name, which is NAME in the certificate's alternative name `veilbase://tenant/NAME`
    (wire/SPEC.md, section 1).

    Raises:
        ConfigurationError: the certificate has no such name.
    """
    try:
        certificate = x509.load_pem_x509_certificate(identity.cert_pem)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return names.get_values_for_type(x509.UniformResourceIdentifier)[0].removeprefix("veilbase://tenant/")
    except (ValueError, IndexError, x509.ExtensionNotFound) as exc:
        raise ConfigurationError("the identity's certificate names no tenant: enrol again") from exc
