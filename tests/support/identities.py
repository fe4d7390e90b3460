"""Holds helpers for tests of certificates and of the registry."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509

import provider.identity.registry as registry
from wire.errors import AccessError

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
