"""Lets a provider serve tenants without the key of the certificate authority (CA): with a server certificate and a copy
of the registry of tenants that were made on another host.

`export_registry` and `export_server_identity` run on the host of the CA. `FrontIdentity` reads the files that they
wrote. It runs on the host of a provider that must not be able to enroll tenants, for example a provider whose products
are computed in a cluster.

Guarantees: the copy is signed by the CA, so it cannot be changed on its way. It counts for a bounded time only, so a
revocation cannot be held back for longer. `FrontIdentity` refuses to start if it can read a CA's key in its own folder,
beside one of its files or in the default state directory. It cannot enroll or revoke anyone.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from provider.config import DEFAULT_STATE
from provider.identity.authority import (
    BACKDATE,
    IdentityNotWritten,
    StateDamaged,
    StateDir,
    issue_server_certificate,
)
from provider.identity.registry import MOST_BYTES, TenantRecord, tenants, write_new_files
from runtime.files import sync_directory
from wire.errors import os_cause

CA_KEY_NAME = "ca_key.pem"
_NO_CA_KEY = "a provider that is given --server-cert must not be able to let anyone in; keep the CA on another host"


class _Copy(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    made_at: AwareDatetime
    tenants: list[TenantRecord]


@dataclass(frozen=True)
class FrontFiles:
    """Names the files that the CA's host made, and the age in seconds at which a copy no longer counts."""

    server_cert: Path
    server_key: Path
    registry: Path
    max_age_s: float


def export_registry(state: StateDir, out: Path, *, now: datetime | None = None) -> int:
    """Writes a signed copy of the registry; an older copy at this path is replaced as a whole.

    Args:
        state: the state directory with the CA.
        out: the path of the copy.
        now: the present time, for tests; None reads the clock.

    Returns:
        The number of certificates in the copy.

    Raises:
        StateDamaged: the registry cannot be read.
        IdentityNotWritten: the copy cannot be written.
    """
    with state.lock():  # Otherwise a copy that was made before a revocation could replace one that was made after it.
        # Parts of a second count: of two copies, `FrontIdentity` must know the later one.
        moment, records = now or datetime.now(UTC), tenants(state)
        body = _Copy(made_at=moment, tenants=records).model_dump_json().encode()
        _replace(out, base64.b64encode(state.ca.key.sign(body, ec.ECDSA(hashes.SHA256()))) + b"\n" + body)
    return len(records)


def _replace(out: Path, data: bytes) -> None:
    try:
        out.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The copy keeps mkstemp's mode 0600: it names all tenants.
        descriptor, temporary = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(out)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        sync_directory(out.parent)
    except OSError as exc:
        raise IdentityNotWritten(f"expected to write {str(out)!r}, got {exc.strerror}") from os_cause(exc)


def export_server_identity(state: StateDir, out_dir: Path, host: str, names: Sequence[str] = ()) -> None:
    """Issues a certificate for a provider that holds no CA key, and writes `server_key.pem` (mode 0600) and
    `server_cert.pem` (the certificate, followed by the CA's) to a folder.

    Raises:
        InvalidHost: a name is neither an IP address nor a DNS name.
        IdentityNotWritten: the folder holds such files already, or cannot be written.
    """
    key, certificate, ca = issue_server_certificate(state, host, names)
    write_new_files(out_dir, {"server_key.pem": key, "server_cert.pem": certificate + ca})


class FrontIdentity:
    """Holds the paths of a server certificate, its key and a registry copy, for a provider without the CA's key.

    `provider.net.server.Server` takes it in place of a `StateDir`.
    """

    def __init__(self, files: FrontFiles, folder: Path, *, now: datetime | None = None) -> None:
        """Reads and checks the files.

        Args:
            files: the certificate, its key and the registry copy.
            folder: the folder for what the provider itself writes: usage and the status socket.
            now: the present time, for tests; None reads the clock.

        Raises:
            StateDamaged: a CA's key can be read in a folder of these files, in `folder` or in the default state
                directory; a file or `folder` cannot be used; or the copy is too old.
        """
        self.path, self.tenants_path, self._files = folder, files.registry, files
        self._newest: _Copy | None = None
        for place in _places(files, folder):
            if os.access(place / CA_KEY_NAME, os.R_OK):
                raise StateDamaged(f"found a readable {CA_KEY_NAME} in {str(place)!r}: {_NO_CA_KEY}")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_mode & 0o022:
                raise StateDamaged(f"expected {str(folder)!r} to be writable by its owner only: run chmod 700 on it")
        except OSError as exc:
            raise StateDamaged(f"expected to use the folder {str(folder)!r}, got {exc.strerror}") from os_cause(exc)
        self._ca = _certificates(files.server_cert)[-1]
        self.server_material()
        try:
            _, ends_at = self.read_registry(_read(files.registry))
        except ValueError as exc:
            raise StateDamaged(
                f"expected in {str(files.registry)!r} a copy made by `provider export-registry` of the CA that issued "
                "--server-cert, found another or a damaged file"
            ) from exc
        if (now or datetime.now(UTC)) >= ends_at:
            raise StateDamaged(
                f"the registry copy {str(files.registry)!r} is older than {files.max_age_s:.0f} s: copy it again"
            )

    def server_material(self) -> tuple[bytes, bytes, bytes]:
        """Reads the server's files again.

        Returns:
            The private key, the certificate and the CA's certificate, each in PEM.

        Raises:
            StateDamaged: the files do not belong together, the key can be read by others, or the certificate has
                expired or is of another CA than at the start.
        """
        key_path = self._files.server_key
        key_pem = _read(key_path)
        if key_path.stat().st_mode & 0o077:
            raise StateDamaged(f"expected {str(key_path)!r} to be readable by its owner only: run chmod 600 on it")
        certificate, ca = _certificates(self._files.server_cert)
        try:
            key = serialization.load_pem_private_key(key_pem, password=None)
            certificate.verify_directly_issued_by(ca)
        except (ValueError, TypeError, UnsupportedAlgorithm, InvalidSignature):
            raise StateDamaged(
                f"expected {str(self._files.server_cert)!r} and {str(key_path)!r} as written by "
                "`provider export-server`, found damaged files"
            ) from None  # the parser's text may quote the key
        if key.public_key() == ca.public_key():
            raise StateDamaged(f"{str(key_path)!r} is the CA's key: {_NO_CA_KEY}")
        if key.public_key() != certificate.public_key() or ca != self._ca:
            raise StateDamaged(f"{str(key_path)!r} is not the key of {str(self._files.server_cert)!r}")
        if certificate.not_valid_after_utc <= datetime.now(UTC):
            raise StateDamaged(f"{str(self._files.server_cert)!r} has expired: run `provider export-server` again")
        encoding = serialization.Encoding.PEM
        return key_pem, certificate.public_bytes(encoding), ca.public_bytes(encoding)

    def read_registry(self, data: bytes) -> tuple[list[TenantRecord], datetime]:
        """Returns the records in a registry copy, and the time from which they no longer count. If an earlier call read
        a copy that was made later, the records and the time of that copy are returned, so that nobody can undo a
        revocation with an old copy.

        Raises:
            ValueError: the copy is damaged, was not signed by the CA, or is dated more than `BACKDATE` after the
                present.
        """
        signature, _, body = data.partition(b"\n")
        public = self._ca.public_key()
        if not isinstance(public, ec.EllipticCurvePublicKey):
            raise ValueError("not a P-256 CA")
        try:
            public.verify(base64.b64decode(signature, validate=True), body, ec.ECDSA(hashes.SHA256()))
            copy = _Copy.model_validate_json(body)
        except (binascii.Error, InvalidSignature, ValidationError):
            raise ValueError("malformed registry copy") from None  # pydantic's text quotes the file
        if copy.made_at > datetime.now(UTC) + BACKDATE:
            raise ValueError("a registry copy of the future")
        if self._newest is None or copy.made_at >= self._newest.made_at:
            self._newest = copy
        return self._newest.tenants, self._newest.made_at + timedelta(seconds=self._files.max_age_s)


def _places(files: FrontFiles, folder: Path) -> set[Path]:
    """Returns the folders in which to look for a CA's key: `folder`, the folders of the files and of the files to which
    these are symbolic links, and the default state directory."""
    paths = [files.server_cert, files.server_key, files.registry]
    return {folder, DEFAULT_STATE.expanduser(), *(one.parent for path in paths for one in (path, path.resolve()))}


def _certificates(path: Path) -> tuple[x509.Certificate, x509.Certificate]:
    """Returns the server's certificate and the CA's certificate from a file; raises StateDamaged if the file does not
    hold exactly two certificates."""
    with contextlib.suppress(ValueError, x509.InvalidVersion):
        certificate, ca = x509.load_pem_x509_certificates(_read(path))
        return certificate, ca
    raise StateDamaged(f"expected in {str(path)!r} the two certificates that `provider export-server` writes")


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise StateDamaged(f"expected {str(path)!r} to have at most {MOST_BYTES >> 20} MiB")
        return path.read_bytes()
    except OSError as exc:
        raise StateDamaged(f"expected to read {str(path)!r}, got {exc.strerror}") from os_cause(exc)
