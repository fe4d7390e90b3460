"""Runs the provider's private certificate authority (CA): creates it in the state directory, issues certificates, and
reads the identity in a peer's certificate.

Guarantees: there is one CA per state directory, even if several processes start at once. No private key is readable by
another user, not even while the key is being written. A tenant's certificate cannot be used as a server's, nor a
server's as a tenant's. No error contains key material. This module does not encrypt keys on disk. It does not verify
certificate chains; TLS does so before `peer_identity` is called. It does not know which certificates are revoked;
`provider.identity.registry` does.
"""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from runtime.files import create_file, sync_directory
from wire.errors import AccessError, Unauthenticated

BACKDATE = timedelta(hours=1)  # A certificate must be valid for peers whose clock is slow.
CA_LIFETIME = timedelta(days=3650)
# Some TLS stacks refuse a longer lifetime: CA/Browser Forum baseline requirements, section 6.3.2.
SERVER_LIFETIME = timedelta(days=397)
_TENANT_URI = "veilbase://tenant/"
_LOGGER = logging.getLogger(__name__)
_REPAIR = "restore it from a backup, or start with an empty directory and enrol every tenant again"

TENANT_NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}$"
_DNS_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*")
_ENDPOINT = re.compile(r"grpcs://[^\s/]+")


class StateDamaged(AccessError):
    """Says that a provider's state directory cannot be used. For example, files are missing or damaged, other users
    have too much access, or the certificate authority has expired."""


class InvalidTenantName(AccessError):
    """Says that a text is not a valid tenant name."""


class InvalidHost(AccessError):
    """Says that a text is neither an IP address nor a DNS name, so that no server certificate can contain it."""


class InvalidEndpoint(AccessError):
    """Says that a text is not a grpcs:// URL."""


class InvalidLifetime(AccessError):
    """Says that a certificate cannot be valid for the given number of days."""


class IdentityNotWritten(AccessError):
    """Says that the output folder already holds an identity (a key and its certificates), or cannot be written to."""


class AlreadyEnrolled(AccessError):
    """Says that the tenant to enroll already has a certificate that is neither revoked nor expired."""


class UnknownTenant(AccessError):
    """Says that no tenant with the given name was ever enrolled."""


class InvalidPeerCertificate(Unauthenticated):
    """Says that a client certificate names no tenant. As a subclass of `Unauthenticated`, this error has a
    code that can be sent to the peer."""


@dataclass(frozen=True)
class CertificateAuthority:
    """Holds the CA's certificate and private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @property
    def pem(self) -> bytes:
        """Returns the CA's certificate in PEM, for peers that are to trust this CA."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)


@dataclass(frozen=True)
class PeerIdentity:
    """Holds the name of the tenant in a client certificate, and the certificate's serial number."""

    name: str
    serial: int


class StateDir:
    """Gives access to a provider's state directory, which has the files `ca_key.pem`, `ca.pem`, `tenants.json` and
    `lock`."""

    def __init__(self, path: str | Path, *, create: bool = True, now: datetime | None = None) -> None:
        """Opens the directory; at first use creates the directory (mode 0700) and a CA in it.

        Args:
            path: the directory.
            create: whether to create a missing directory or CA. Commands that only read or revoke pass False, so that a
                mistyped path is an error and does not create a second CA.
            now: the present time with a time zone, for tests; None reads the clock.

        Raises:
            StateDamaged: the directory is missing and `create` is False; the directory is unreadable, incomplete or
                writable by other users; or its CA has expired.
        """
        self.path = Path(path)
        self.ca_key_path = self.path / "ca_key.pem"
        self.ca_path = self.path / "ca.pem"
        self.tenants_path = self.path / "tenants.json"
        try:
            self._prepare(create)
            with self.lock():
                self.ca = self._open_authority(create, current_time(now))
        except OSError as exc:
            raise self.damaged(f"expected a directory that this user can write, got {exc.strerror}") from exc

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Locks the directory against other processes and threads during the `with` block. Blocks of one thread must
        not be nested."""
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)  # This also releases the lock, which belongs to the open file.

    def damaged(self, text: str) -> StateDamaged:
        """Returns a `StateDamaged` error with this directory's path, followed by the given text."""
        return StateDamaged(f"provider state {str(self.path)!r}: {text}")

    def _prepare(self, create: bool) -> None:
        if create:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif not self.path.is_dir():
            raise self._nothing_here()
        if self.path.stat().st_mode & 0o022:
            # Another user with write access could replace the CA.
            raise self.damaged("expected a directory that only its owner can write: run chmod 700 on it")

    def _open_authority(self, create: bool, now: datetime) -> CertificateAuthority:
        num_present = sum(os.path.lexists(path) for path in (self.ca_key_path, self.ca_path))
        if num_present == 2:
            return self._load_authority(now)
        if num_present == 1:
            if not create or not self._has_no_tenants():
                raise self.damaged(f"expected both ca_key.pem and ca.pem, found only one: {_REPAIR}")
            _LOGGER.warning("%s: a CA that was not written whole, and enrolled nobody, is made anew", self.path)
            for path in (self.ca_key_path, self.ca_path):
                path.unlink(missing_ok=True)
        if not create:
            raise self._nothing_here()
        return self._create_authority(now)

    def _has_no_tenants(self) -> bool:
        """Tells whether no certificate was ever issued: revoked and expired ones stay in the registry."""
        return self.tenants_path.is_file() and self.tenants_path.read_bytes().strip() == b"[]"

    def _nothing_here(self) -> StateDamaged:
        return self.damaged("found no provider here: check --state, or run `provider serve --tls` or `enroll` first")

    def _create_authority(self, now: datetime) -> CertificateAuthority:
        # The empty registry is written before the CA. So if there is a CA without a registry, the registry was lost,
        # and RevocationList refuses all callers.
        if not os.path.lexists(self.tenants_path):
            create_file(self.tenants_path, b"[]\n")
        elif not self._has_no_tenants():
            raise self.damaged(f"found enrolled tenants but neither ca_key.pem nor ca.pem: {_REPAIR}")
        authority = _new_authority(now)
        create_file(self.ca_key_path, _private_pem(authority.key))
        create_file(self.ca_path, authority.pem, mode=0o644)
        sync_directory(self.path)
        return authority

    def _load_authority(self, now: datetime) -> CertificateAuthority:
        if self.ca_key_path.stat().st_mode & 0o077:
            raise self.damaged("expected ca_key.pem to be readable by its owner only: run chmod 600 on it")
        authority = _parse_authority(self.ca_key_path.read_bytes(), self.ca_path.read_bytes())
        if authority is None:
            raise self.damaged(f"expected ca_key.pem and ca.pem to be one P-256 CA, found damaged files: {_REPAIR}")
        end = authority.certificate.not_valid_after_utc
        if end <= now:
            raise self.damaged(f"the CA expired on {end:%Y-%m-%d}: {_REPAIR}")
        return authority


def issue_server_certificate(
    state: StateDir, host: str, names: Sequence[str] = (), *, now: datetime | None = None
) -> tuple[bytes, bytes, bytes]:
    """Issues a certificate for the provider's server, which is valid for `SERVER_LIFETIME`, or until the CA expires if
    that is earlier. This function writes nothing to disk; a provider with the CA's key calls it at each start.

    Args:
        state: the provider's state directory.
        host: the IP address (brackets allowed) or DNS name under which tenants reach the provider. The certificate also
            names localhost, 127.0.0.1, ::1 and the machine's own name.
        names: further names for the certificate, such as the name of a load balancer.
        now: the present time, for tests; None reads the clock.

    Returns:
        The private key, the certificate chain and the CA's certificate, each in PEM.

    Raises:
        InvalidHost: a name is neither an IP address nor a DNS name.
    """
    start = current_time(now)
    own_name = socket.gethostname()
    hosts = ["localhost", "127.0.0.1", "::1", host, *names, *([own_name] if _DNS_NAME.fullmatch(own_name) else [])]
    known = list(dict.fromkeys(_server_name(one) for one in hosts))
    end = min(start + SERVER_LIFETIME, state.ca.certificate.not_valid_after_utc)
    key, certificate = _issue(state.ca, "veilbase provider", known, ExtendedKeyUsageOID.SERVER_AUTH, start, end)
    return _private_pem(key), certificate.public_bytes(serialization.Encoding.PEM), state.ca.pem


def issue_tenant_certificate(
    ca: CertificateAuthority, name: str, days: int, now: datetime
) -> tuple[bytes, x509.Certificate]:
    """Issues a key and a certificate for a tenant, in memory; `provider.identity.registry.enroll` saves and
    registers them.

    Args:
        ca: the CA that signs.
        name: the name of the tenant.
        days: the lifetime in days.
        now: the time at which the lifetime begins.

    Returns:
        The private key in PEM, and the certificate.

    Raises:
        InvalidTenantName, InvalidLifetime: the name or the number of days is not allowed.
    """
    check_tenant_name(name)
    most_days = (ca.certificate.not_valid_after_utc - now).days
    if not 1 <= days <= most_days:
        raise InvalidLifetime(f"expected a lifetime of 1 to {most_days} days (the CA ends then), got {days}")
    # The name is put into a URI only. A client could mistake a DNS name, an IP address or a common name such as
    # `localhost` for the server's name.
    names = [x509.UniformResourceIdentifier(_TENANT_URI + name)]
    end = now + timedelta(days=days)
    key, certificate = _issue(ca, "veilbase tenant", names, ExtendedKeyUsageOID.CLIENT_AUTH, now, end)
    return _private_pem(key), certificate


def peer_identity(cert_pem: bytes) -> PeerIdentity:
    """Reads the name of the tenant, and the serial number, from a client certificate.

    Before this call, the TLS layer must have verified the certificate's chain and dates.

    Args:
        cert_pem: one certificate, as in gRPC's `auth_context()["x509_pem_cert"][0]`.

    Returns:
        The name and the serial number.

    Raises:
        InvalidPeerCertificate: `cert_pem` is not exactly one certificate; or the certificate's extended key usage is
            not client authentication alone; or its alternative names are not exactly one veilbase://tenant/NAME.
    """
    refusal = InvalidPeerCertificate("expected a tenant's certificate from `provider enroll`, got another: enrol again")
    try:
        (certificate,) = x509.load_pem_x509_certificates(cert_pem)
        usages = list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
        (name,) = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        serial = certificate.serial_number
    except (
        ValueError,
        UnsupportedAlgorithm,
        x509.InvalidVersion,
        x509.DuplicateExtension,
        x509.ExtensionNotFound,
        x509.UnsupportedGeneralNameType,
    ):
        raise refusal from None  # the cause's text may hold bytes of the peer's certificate
    if usages != [ExtendedKeyUsageOID.CLIENT_AUTH] or not isinstance(name, x509.UniformResourceIdentifier):
        raise refusal
    named = name.value.removeprefix(_TENANT_URI)
    if named == name.value or not re.fullmatch(TENANT_NAME_PATTERN, named):
        raise refusal
    return PeerIdentity(named, serial)


def check_tenant_name(name: str) -> None:
    """Raises InvalidTenantName if a text does not match `TENANT_NAME_PATTERN`, a pattern that allows no paths, URI
    syntax or newlines."""
    if not re.fullmatch(TENANT_NAME_PATTERN, name):
        raise InvalidTenantName(
            f"expected a tenant name of 1 to 63 of a-z 0-9 . _ - that starts with a letter or digit, got {name[:80]!r}"
        )


def check_endpoint(endpoint: str) -> None:
    """Raises InvalidEndpoint if a text is not one grpcs:// URL without a path."""
    if not _ENDPOINT.fullmatch(endpoint):
        raise InvalidEndpoint(f"expected an endpoint such as grpcs://host:8443, got {endpoint[:80]!r}")


def current_time(now: datetime | None = None) -> datetime:
    """Returns `now`, or the clock's time if `now` is None, in UTC and cut to whole seconds as in certificates."""
    return (now or datetime.now(UTC)).astimezone(UTC).replace(microsecond=0)


def _server_name(host: str) -> x509.GeneralName:
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        return x509.IPAddress(ipaddress.ip_address(bare))
    except ValueError as exc:
        if _DNS_NAME.fullmatch(bare) is None:
            raise InvalidHost(
                f"expected an IP address or a DNS name in ASCII for --host and --names, got {host[:80]!r}"
            ) from exc
        return x509.DNSName(bare)


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _key_usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        encipher_only=False,
        decipher_only=False,
    )


def _builder(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, start: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - BACKDATE)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _new_authority(now: datetime) -> CertificateAuthority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _common_name("veilbase provider CA")
    certificate = (
        _builder(name, key, now, now + CA_LIFETIME)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(is_ca=True), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return CertificateAuthority(certificate, key)


def _issue(
    ca: CertificateAuthority,
    common_name: str,
    names: Sequence[x509.GeneralName],
    usage: x509.ObjectIdentifier,
    start: datetime,
    end: datetime,
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(_common_name(common_name), key, start, end)
        .issuer_name(ca.certificate.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(is_ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key()), critical=False)
        .sign(ca.key, hashes.SHA256())
    )
    return key, certificate


def _parse_authority(key_pem: bytes, cert_pem: bytes) -> CertificateAuthority | None:
    """Returns the CA, or None if the files do not hold a P-256 CA. The parser's error text is dropped, since that text
    may quote the key."""
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
        certificate = x509.load_pem_x509_certificate(cert_pem)
        is_ca = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion, x509.ExtensionNotFound):
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1) or not is_ca:
        return None
    return CertificateAuthority(certificate, key) if key.public_key() == certificate.public_key() else None
