"""The tenant registry: which tenants are enrolled, which are revoked, and the check that every request makes.

Guarantees: `tenants.json` is replaced whole, under the state directory's lock and fsynced, so a reader sees the old or
the new registry and a revocation that was reported is on disk; a registry that is missing or malformed admits nobody;
one that cannot be read for want of descriptors, or by a fault of the disk, lets no new caller in, and counts as it was
for a minute at most. This module does not close open connections: the service asks `RevocationList` on every request,
inside open streams too.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from cryptography.hazmat.primitives import serialization
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from provider.identity.authority import (
    TENANT_NAME_PATTERN,
    AlreadyEnrolled,
    IdentityNotWritten,
    Role,
    StateDir,
    UnknownTenant,
    check_endpoint,
    check_tenant_name,
    create_file,
    current_time,
    issue_tenant_certificate,
    sync_directory,
)
from provider.net.descriptors import SpareDescriptor
from wire.errors import Unavailable

HELD_OVER_S = 60.0
"""Seconds after it was last seen to be current for which the registry counts as it was while it cannot be read. This
covers a flood that takes every descriptor; a revocation that is made meanwhile comes later by no more than this."""
RETRY_S = 5.0
"""Seconds after which a refused caller may ask again: a descriptor or a disk comes back at no known time."""
_PASSING = {errno.EMFILE: "raise the limit of open files (ulimit -n)", errno.ENFILE: "this machine has too many open"}
_PASSING[errno.EIO] = "look at the disk"
"""Errors that say nothing about the registry's contents, and what the operator can do about each."""
_LOGGER = logging.getLogger(__name__)


class RegistryUnreadable(Unavailable):
    """The registry cannot be read just now. As this is an Unavailable, it has a code on the wire."""

    def __init__(self) -> None:
        super().__init__("the registry of tenants cannot be read at the moment", RETRY_S)


class TenantRecord(BaseModel):
    """One issued certificate, live or not; `serial` is lower-case hexadecimal."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(pattern=TENANT_NAME_PATTERN)]
    # RFC 5280, 4.1.2.2: a serial number has at most 20 octets.
    serial: Annotated[str, Field(pattern=r"^[1-9a-f][0-9a-f]{0,39}$")]
    not_after: AwareDatetime
    enrolled_at: AwareDatetime
    revoked_at: AwareDatetime | None
    role: Role = "tenant"

    def is_live(self, now: datetime) -> bool:
        """Tells whether the certificate is neither revoked nor expired."""
        return self.revoked_at is None and now < self.not_after


_REGISTRY = TypeAdapter(list[TenantRecord])


def enroll(
    state: StateDir,
    name: str,
    out_dir: str | Path,
    endpoint: str,
    days: int = 365,
    *,
    role: Role = "tenant",
    now: datetime | None = None,
) -> TenantRecord:
    """Issues a tenant's identity: `key.pem` (mode 0600), `cert.pem`, `ca.pem` and `endpoint` in `out_dir`.

    Args:
        state: the provider's state.
        name: see `provider.identity.authority.check_tenant_name`.
        out_dir: made with mode 0700 if it is not there; must not hold any of the four files.
        endpoint: the grpcs:// URL that the tenant is to use.
        days: the lifetime of the certificate.
        role: `shard` makes the identity of a host that joins with `provider shard`.
        now: the time, for tests.

    Returns:
        The record that is now in the registry.

    Raises:
        InvalidTenantName, InvalidEndpoint, InvalidLifetime: see the arguments.
        AlreadyEnrolled: the name has a live certificate.
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
        key_pem, certificate = issue_tenant_certificate(state.ca, name, days, start, role)
        record = TenantRecord(
            name=name,
            serial=f"{certificate.serial_number:x}",
            not_after=certificate.not_valid_after_utc,
            enrolled_at=start,
            revoked_at=None,
            role=role,
        )
        files = {
            "key.pem": key_pem,
            "cert.pem": certificate.public_bytes(serialization.Encoding.PEM),
            "ca.pem": state.ca.pem,
            "endpoint": f"{endpoint}\n".encode(),
        }
        # It is registered last: a crash in between leaves a certificate that no registry knows, which admits nobody.
        _write_identity(Path(out_dir), files, lambda: _save(state, [*records, record]))
    return record


def revoke(state: StateDir, name: str, *, now: datetime | None = None) -> int:
    """Marks every live certificate of a tenant revoked; this is on disk when it returns.

    Returns:
        How many were marked; 0 where all had been revoked or had expired before.

    Raises:
        UnknownTenant: the name was never enrolled here.
        StateDamaged: the registry cannot be read or written.
    """
    moment = current_time(now)
    with state.lock():
        records = tenants(state)
        if not any(record.name == name for record in records):
            raise UnknownTenant(f"expected an enrolled tenant, got {name[:80]!r}: `provider tenants` lists them")
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


def tenants(state: StateDir) -> list[TenantRecord]:
    """Returns every certificate ever issued to a tenant, in order of issue.

    Raises:
        StateDamaged: the registry is missing, unreadable or malformed.
    """
    try:
        return _parse(state.tenants_path.read_bytes())
    except (OSError, ValueError) as exc:
        # pydantic's own words quote the file, so they stay out of the message.
        raise state.damaged(
            "expected a readable registry in tenants.json, found it missing or malformed: restore it from a backup"
        ) from exc


def _now() -> datetime:
    return datetime.now(UTC)  # Every request asks, and this is cheaper than whole seconds.


class RevocationList:
    """Answers from `tenants.json` on every request: with one stat, and a reload only when the file has changed.

    Threads may share it. While the file is missing or malformed everything counts as revoked. While it cannot be read
    for want of descriptors (one is kept spare for it) or by a fault of the disk, what was read last counts, for
    `HELD_OVER_S`; then every question raises `RegistryUnreadable`. It recovers by itself when the file does.
    """

    def __init__(
        self,
        state: StateDir,
        *,
        clock: Callable[[], datetime] = _now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepares; the file is read at the first question.

        Args:
            state: the provider's state.
            clock: gives the time that certificates' dates are compared with.
            monotonic: gives seconds, to measure for how long a registry that cannot be read has counted.
        """
        self._path, self._name = state.tenants_path, str(state.tenants_path)
        self._clock, self._monotonic = clock, monotonic
        self._reloading = threading.Lock()
        # Stamp and records change together, as one reference, so that a reader without the lock sees a matching pair.
        self._snapshot: tuple[_Stamp | None, dict[int, TenantRecord] | None] = (None, None)
        self._seen_at = float("-inf")
        """When the file was last seen to be what the snapshot says, or to be gone."""
        self._spare = SpareDescriptor()
        self._noting = threading.Lock()
        self._trouble: str | None = None

    def is_revoked(self, serial: int) -> bool:
        """Tells whether this certificate was revoked; True for all while the registry is missing or malformed.

        Raises:
            RegistryUnreadable: the registry has been out of reach for too long.
        """
        records = self._known()
        if records is None:
            return True
        record = records.get(serial)
        return record is not None and record.revoked_at is not None

    def is_enrolled(self, serial: int) -> bool:
        """Tells whether this certificate is registered, not revoked and not expired: TLS checks dates only at a
        handshake.

        Raises:
            RegistryUnreadable: see `is_revoked`.
        """
        records = self._known()
        record = None if records is None else records.get(serial)
        return record is not None and record.is_live(self._clock())

    def check_current(self) -> None:
        """Checks that the registry can be read now. It is for new callers, for which what was read earlier does not
        count.

        Raises:
            RegistryUnreadable: the registry cannot be read.
        """
        try:
            self._current()
        except OSError as exc:
            self._note(f"cannot be read ({os.strerror(exc.errno or 0)})", self._consequence(exc))
            raise RegistryUnreadable from None  # an answer to a peer; the log has the cause

    def _known(self) -> dict[int, TenantRecord] | None:
        """Returns the newest records that count, or None where no caller is to be admitted."""
        try:
            return self._current()
        except OSError as exc:
            is_over = self._monotonic() - self._seen_at >= HELD_OVER_S
            what = f"cannot be read ({os.strerror(exc.errno or 0)})"
            if is_over:
                self._note(f"still {what}", f"every request is refused until it can: {_PASSING[exc.errno or 0]}")
                raise RegistryUnreadable from None  # asked for every request; the log has the cause
            self._note(what, self._consequence(exc))
            return self._snapshot[1]

    @staticmethod
    def _consequence(exc: OSError) -> str:
        advice = _PASSING[exc.errno or 0]
        return f"nobody new is let in, and open streams go on for {HELD_OVER_S:.0f} s at most: {advice}"

    def _current(self) -> dict[int, TenantRecord] | None:
        """Returns what the file says now; raises OSError where that cannot be found out, for a reason that is in
        `_PASSING`."""
        try:
            stamp, records = self._snapshot
            if stamp != _stamp(os.stat(self._name)):
                with self._reloading:
                    records = self._reload()
        except OSError as exc:
            if exc.errno in _PASSING:
                raise
            records = None
            self._snapshot = (None, None)  # What was enrolled before must not count again when reading fails later.
        self._seen_at = self._monotonic()
        self._spare.take_back()
        if records is None:
            self._note("is missing or malformed", "nobody is admitted: restore it from a backup")
        elif self._trouble is not None:
            self._note(None, "")
        return records

    def _reload(self) -> dict[int, TenantRecord] | None:
        try:
            return self._read()
        except OSError as exc:
            if exc.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            with self._spare.lent():
                return self._read()

    def _read(self) -> dict[int, TenantRecord] | None:
        with self._path.open("rb") as file:
            # It is stamped before it is read, through the open file: a change while reading makes the next call read
            # again.
            stamp = _stamp(os.fstat(file.fileno()))
            if stamp == self._snapshot[0]:
                return self._snapshot[1]  # Another thread was here first.
            data = file.read()
        try:
            records = {int(record.serial, 16): record for record in _parse(data)}
        except ValueError:
            records = None
        self._snapshot = (stamp, records)
        return records

    def _note(self, trouble: str | None, consequence: str) -> None:
        """Logs one line whenever the trouble changes, and one when there is none any more."""
        with self._noting:
            if trouble == self._trouble or (self._trouble or "").startswith(f"still {trouble}"):
                return
            self._trouble = trouble
        if trouble is None:
            _LOGGER.warning("tenants.json can be read again")
        else:
            _LOGGER.error("tenants.json %s: %s", trouble, consequence)


_Stamp = tuple[int, int, int, int]


def _stamp(status: os.stat_result) -> _Stamp:
    # The change time is in it because a restored copy can have the old size and modification time.
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)


def _parse(data: bytes) -> list[TenantRecord]:
    """Returns the registry; raises ValueError where it is malformed or lists a serial number twice."""
    try:
        records = _REGISTRY.validate_json(data)
    except ValidationError:
        raise ValueError("malformed registry") from None  # pydantic's text quotes the file, which names tenants
    if len({record.serial for record in records}) != len(records):
        raise ValueError("a serial number occurs twice")
    return records


def _save(state: StateDir, records: Sequence[TenantRecord]) -> None:
    """Replaces the registry whole; the caller holds the lock."""
    temporary = state.path / "tenants.json.tmp"
    try:
        temporary.unlink(missing_ok=True)  # A crash left it: the lock says that no other process is writing it.
        create_file(temporary, _REGISTRY.dump_json(list(records), indent=1) + b"\n")
        temporary.replace(state.tenants_path)
        sync_directory(state.path)
    except OSError as exc:
        raise state.damaged(f"expected to write tenants.json, got {exc.strerror}") from exc


def _write_identity(out_dir: Path, files: dict[str, bytes], commit: Callable[[], None]) -> None:
    """Writes all files and commits, or leaves none of them behind."""
    written: list[Path] = []
    try:
        out_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file_name, data in files.items():
            path = out_dir / file_name
            create_file(path, data, mode=0o600 if file_name == "key.pem" else 0o644)
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
