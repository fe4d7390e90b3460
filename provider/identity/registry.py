"""Keeps the registry of enrolled and revoked tenants.

Guarantees: `tenants.json` is replaced as a whole, under the state directory's lock, and synced to disk. So a reader
sees either the old or the new registry, and a revocation is on disk once it is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from cryptography.hazmat.primitives import serialization
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from provider.identity.authority import (
    TENANT_NAME_PATTERN,
    AlreadyEnrolled,
    IdentityNotWritten,
    StateDir,
    UnknownTenant,
    check_endpoint,
    check_tenant_name,
    current_time,
    issue_tenant_certificate,
)
from runtime.command_line import nearest
from runtime.files import create_file, sync_directory

_MOST_COMPARED = 1000
"""The most names among which the nearest to an unknown one is looked for: more would take seconds."""
MOST_BYTES = 64 << 20
"""The most bytes of a registry's file that are read. A registry of a hundred thousand certificates has about 20 MB."""


class TenantRecord(BaseModel):
    """Describes one certificate that was issued, even if it is no longer valid; `serial` is lower-case hexadecimal."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=TENANT_NAME_PATTERN)]
    # A serial number has at most 20 octets: RFC 5280, section 4.1.2.2.
    serial: Annotated[str, Field(pattern=r"^[1-9a-f][0-9a-f]{0,39}$")]
    not_after: AwareDatetime
    enrolled_at: AwareDatetime
    revoked_at: AwareDatetime | None
    role: Literal["tenant", "shard"] = "tenant"
    """The kind of host that the certificate was issued to. An earlier release also enrolled hosts of shards; their
    certificates are refused now."""

    def is_live(self, now: datetime) -> bool:
        return self.revoked_at is None and now < self.not_after


_REGISTRY = TypeAdapter(list[TenantRecord])


def enroll(
    state: StateDir,
    name: str,
    out_dir: str | Path,
    endpoint: str,
    days: int = 365,
    *,
    now: datetime | None = None,
) -> TenantRecord:
    """Enrolls a tenant: writes `key.pem` (mode 0600), `cert.pem`, `ca.pem` and `endpoint` to `out_dir`, and
    registers the certificate.

    Args:
        state: the provider's state directory.
        name: the tenant's name; see `provider.identity.authority.check_tenant_name`.
        out_dir: the folder for these four files, none of which may exist yet. A missing folder is created with mode
            0700.
        endpoint: the grpcs:// URL that the tenant is to use.
        days: the lifetime of the certificate in days.
        now: the present time, for tests; None reads the clock.

    Returns:
        The new record in the registry.

    Raises:
        InvalidTenantName, InvalidEndpoint, InvalidLifetime: an argument is not valid.
        AlreadyEnrolled: the name already has a certificate that is neither revoked nor expired.
        IdentityNotWritten: `out_dir` holds an identity or cannot be written.
        StateDamaged: the registry cannot be read or written.
    """
    check_tenant_name(name)
    check_endpoint(endpoint)
    start = current_time(now)
    with state.lock():
        records = tenants(state)
        if any(record.name == name and record.is_live(start) for record in records):
            raise AlreadyEnrolled(f"tenant {name!r} has a valid certificate: run `provider revoke {name}` first")
        key_pem, certificate = issue_tenant_certificate(state.ca, name, days, start)
        record = TenantRecord(
            name=name,
            serial=f"{certificate.serial_number:x}",
            not_after=certificate.not_valid_after_utc,
            enrolled_at=start,
            revoked_at=None,
        )
        files = {
            "key.pem": key_pem,
            "cert.pem": certificate.public_bytes(serialization.Encoding.PEM),
            "ca.pem": state.ca.pem,
            "endpoint": f"{endpoint}\n".encode(),
        }
        # The certificate is registered last. After a crash in between, it is not in the registry, and is refused.
        write_new_files(Path(out_dir), files, lambda: _save(state, [*records, record]))
    return record


def revoke(state: StateDir, name: str, *, now: datetime | None = None) -> int:
    """Revokes every valid certificate of a tenant; the revocation is on disk when this function returns.

    Returns:
        The number of certificates that were revoked; 0 if all had been revoked or had expired before.

    Raises:
        UnknownTenant: the name was never enrolled here.
        StateDamaged: the registry cannot be read or written.
    """
    moment = current_time(now)
    with state.lock():
        records = tenants(state)
        check_known(name, {record.name for record in records})
        after = [
            record.model_copy(update={"revoked_at": moment})
            if record.name == name and record.is_live(moment)
            else record
            for record in records
        ]
        num_revoked = sum(new is not old for new, old in zip(after, records, strict=True))
        if num_revoked:
            _save(state, after)
    return num_revoked


def check_known(name: str, known: Collection[str]) -> None:
    """Raises UnknownTenant, with the nearest name, if `name` is not among those of enrolled tenants."""
    if name not in known:
        few = sorted(known) if len(known) <= _MOST_COMPARED else []
        meant = nearest(name, few)
        advice = "" if meant is None else f"did you mean {meant}? "
        raise UnknownTenant(f"expected an enrolled tenant, got {name[:80]!r}: {advice}`provider tenants` lists them")


def tenants(state: StateDir) -> list[TenantRecord]:
    """Returns the records of all certificates that were ever issued to tenants, in order of issue.

    Raises:
        StateDamaged: the registry is missing, unreadable or malformed.
    """
    try:
        return parse_records(state.tenants_path.read_bytes())
    except (OSError, ValueError) as exc:
        # pydantic's error text quotes the file, so it stays out of the message.
        raise state.damaged(
            "expected a readable registry in tenants.json, found it missing or malformed: restore it from a backup"
        ) from exc


def parse_records(data: bytes) -> list[TenantRecord]:
    """Returns the records in a registry file; raises ValueError if it is malformed or lists a serial number twice."""
    try:
        records = _REGISTRY.validate_json(data)
    except ValidationError:
        raise ValueError("malformed registry") from None  # pydantic's text quotes the file, which names tenants
    if len({record.serial for record in records}) != len(records):
        raise ValueError("a serial number occurs twice")
    return records


def _save(state: StateDir, records: Sequence[TenantRecord]) -> None:
    """Replaces the registry file as a whole. Callers must hold the state directory's lock."""
    temporary = state.path / "tenants.json.tmp"
    try:
        temporary.unlink(missing_ok=True)  # It is left from a crash, since nobody else holds the lock.
        create_file(temporary, _REGISTRY.dump_json(list(records), indent=1) + b"\n")
        temporary.replace(state.tenants_path)
        sync_directory(state.path)
    except OSError as exc:
        raise state.damaged(f"expected to write tenants.json, got {exc.strerror}") from exc


def write_new_files(out_dir: Path, files: dict[str, bytes], commit: Callable[[], None] = lambda: None) -> None:
    """Writes an identity's files to a folder and then calls `commit`; if a write or `commit` fails, removes the written
    files. Files whose names end in `key.pem` have mode 0600.

    Raises:
        IdentityNotWritten: one of the files exists, or cannot be written.
    """
    written: list[Path] = []
    try:
        out_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file_name, data in files.items():
            path = out_dir / file_name
            create_file(path, data, mode=0o600 if file_name.endswith("key.pem") else 0o644)
            written.append(path)
        sync_directory(out_dir)
        commit()
    except BaseException as exc:
        for path in written:
            path.unlink(missing_ok=True)
        if isinstance(exc, FileExistsError) and out_dir.is_dir():
            raise IdentityNotWritten(
                f"found an identity in {str(out_dir)!r}: choose another --out, or remove the old files"
            ) from exc
        if isinstance(exc, OSError):
            raise IdentityNotWritten(f"expected to write to {str(out_dir)!r}, got {exc.strerror}") from exc
        raise
