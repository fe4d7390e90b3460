"""Checks certificates against the registry of enrolled and revoked tenants, for every request.

Guarantees: the file is read again whenever it has changed. If it is missing or malformed, all callers are refused. If
it cannot be read because file descriptors ran out or the disk failed, new callers are refused; for open streams, the
registry as last read still counts for at most a minute. This module does not close open connections; the service asks
`RevocationList` for every request, also on open streams.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from provider.identity.registry import MOST_BYTES, TenantRecord, parse_records
from provider.net.descriptors import SpareDescriptor
from wire.errors import Unavailable

HELD_OVER_S = 60.0
"""The seconds for which the registry as last read still counts if it can no longer be read. So open streams survive a
flood of connections that takes every file descriptor. A revocation made in that time takes effect at most `HELD_OVER_S`
seconds later."""
RETRY_S = 5.0
"""The seconds after which a refused caller may retry; the time at which the registry becomes readable is not known."""
_PASSING = {errno.EMFILE: "raise the limit of open files (ulimit -n)", errno.ENFILE: "this machine has too many open"}
_PASSING[errno.EIO] = "look at the disk"
"""Maps errors of the operating system to advice for the operator. After these errors the registry counts as unreadable,
and not as damaged."""
_LOGGER = logging.getLogger(__name__)


class RegistryUnreadable(Unavailable):
    """Says that the registry of tenants cannot be read at present. As a subclass of `Unavailable`, this error has a
    code that can be sent to the peer."""

    def __init__(self) -> None:
        super().__init__("the registry of tenants cannot be read at the moment", RETRY_S)


class RegistryPlace(Protocol):
    """Says where a registry is: in a state directory, or in a copy of one (`provider.identity.front`)."""

    @property
    def tenants_path(self) -> Path:
        """Returns the path of the registry's file."""
        ...


ReadRegistry = Callable[[bytes], tuple[list[TenantRecord], datetime | None]]
"""A function that gets the contents of a registry's file, and returns the records and the time from which they no
longer count, or None if they always count. It raises ValueError if the file is malformed."""


def _now() -> datetime:
    return datetime.now(UTC)  # This expression runs for every request, and is cheaper than `current_time`.


_Stamp = tuple[int, int, int, int]


@dataclass(frozen=True)
class _Snapshot:
    """Holds what was read from a registry's file, by serial number; `records` is None if the file is missing or
    malformed. From `ends_at` on, which is `ends_at_s` on the monotonic clock, the records no longer count. If `ends_at`
    is None, they always count, and `ends_at_s` has no meaning."""

    stamp: _Stamp | None
    records: dict[int, TenantRecord] | None
    ends_at: datetime | None = None
    ends_at_s: float = 0.0


_NOTHING_READ = _Snapshot(None, None)


class RevocationList:
    """Checks certificates against `tenants.json`, which is read again only when `stat` shows that it has changed.

    Several threads may use one instance. While the file is missing or malformed, every certificate counts as revoked.
    If file descriptors run out, a spare descriptor is used to read the file. If the file still cannot be read, or if
    the disk fails, the records that were read last count for `HELD_OVER_S` seconds. After that, every check raises
    `RegistryUnreadable` until the file can be read again. While the file is a copy that is too old, every check raises
    `RegistryUnreadable` too, so that tenants wait for a new copy and are not told that they were revoked.
    """

    def __init__(
        self,
        state: RegistryPlace,
        *,
        read: ReadRegistry | None = None,
        clock: Callable[[], datetime] = _now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reserves a spare file descriptor; the file is read at the first check.

        Args:
            state: the provider's state directory, or the place of a copy of its registry.
            read: reads the file; None reads a state directory's own registry.
            clock: returns the present time, which is compared with the certificates' dates.
            monotonic: returns the seconds of a monotonic clock, by which the time without a readable file is measured.
        """
        self._path, self._name = state.tenants_path, str(state.tenants_path)
        self._read_records = read or _own
        self._clock, self._monotonic = clock, monotonic
        self._reloading = threading.Lock()
        # These are replaced together, as one object, so that a reader without the lock sees what belongs together.
        self._snapshot = _NOTHING_READ
        self._seen_at = float("-inf")
        """The time on the monotonic clock at which it was last known what the file holds, or that the file is
        missing."""
        self._spare = SpareDescriptor()
        self._noting = threading.Lock()
        self._trouble: str | None = None

    def is_revoked(self, serial: int) -> bool:
        """Returns True if a certificate is registered as revoked, or if the registry is missing or malformed.

        Raises:
            RegistryUnreadable: the registry could not be read for `HELD_OVER_S` seconds, or is a copy that is too old.
        """
        records = self._known()
        if records is None:
            return True
        record = records.get(serial)
        return record is not None and record.revoked_at is not None

    def is_enrolled(self, serial: int) -> bool:
        """Returns whether a certificate is registered, not revoked and not expired.

        The date is checked here for every request, since TLS checks it only at the handshake.

        Raises:
            RegistryUnreadable: see `is_revoked`.
        """
        records = self._known()
        record = None if records is None else records.get(serial)
        return record is not None and record.is_live(self._clock())

    def why_refused(self, serial: int) -> str:
        """Returns for the log why `is_enrolled` said no. The text is fixed, and holds nothing of a certificate."""
        records = self._snapshot.records
        if records is None:
            return "the registry of tenants is missing or malformed"
        record = records.get(serial)
        if record is None:
            return "its certificate is not in the registry"
        return "its certificate has expired" if record.revoked_at is None else "its certificate was revoked"

    def expired_names(self) -> set[str]:
        """Returns the names of the tenants whose newest certificate has expired and was not revoked. TLS refuses these
        tenants, so that no other part of the provider learns that they called.

        Raises:
            RegistryUnreadable: see `is_revoked`.
        """
        records, now = (self._known() or {}).values(), self._clock()
        newest = {one.name: one for one in sorted(records, key=lambda one: one.enrolled_at)}
        return {name for name, one in newest.items() if one.revoked_at is None and not one.is_live(now)}

    def check_current(self) -> None:
        """Checks that the registry can be read now, which is a condition for admitting a new caller.

        Raises:
            RegistryUnreadable: the registry cannot be read, or is a copy that is too old.
        """
        try:
            self._in_time(self._current())
        except OSError as exc:
            self._note(f"cannot be read ({os.strerror(exc.errno or 0)})", self._consequence(exc))
            raise RegistryUnreadable from None  # It goes to a peer; the log has the cause.

    def seconds_left(self) -> float | None:
        """Returns the seconds for which a copy of the registry still counts, 0 if it is too old; None if the registry
        is no copy, or cannot be read at present."""
        with contextlib.suppress(OSError):
            read = self._current()
            if read.ends_at is not None:
                by_date = (read.ends_at - self._clock()).total_seconds()
                return max(0.0, min(by_date, read.ends_at_s - self._monotonic()))
        return None

    def _known(self) -> dict[int, TenantRecord] | None:
        """Returns the records by serial number: from the file or, if the file cannot be read, the records that were
        read last. None means that all callers are to be refused."""
        try:
            return self._in_time(self._current())
        except OSError as exc:
            is_over = self._monotonic() - self._seen_at >= HELD_OVER_S
            what = f"cannot be read ({os.strerror(exc.errno or 0)})"
            if is_over:
                self._note(f"still {what}", f"every request is refused until it can: {_PASSING[exc.errno or 0]}")
                raise RegistryUnreadable from None  # It goes to a peer; the log has the cause.
            self._note(what, self._consequence(exc))
            return self._in_time(self._snapshot)

    def _in_time(self, read: _Snapshot) -> dict[int, TenantRecord] | None:
        """Returns the records of a snapshot; raises RegistryUnreadable if they no longer count."""
        if self._is_too_old(read):
            raise RegistryUnreadable
        return read.records

    def _is_too_old(self, read: _Snapshot) -> bool:
        """Returns whether the records of a snapshot no longer count, by the wall clock or by the monotonic clock. The
        wall clock alone is not enough, since it can be set back."""
        ends_at = read.ends_at
        return ends_at is not None and (self._clock() >= ends_at or self._monotonic() >= read.ends_at_s)

    @staticmethod
    def _consequence(exc: OSError) -> str:
        advice = _PASSING[exc.errno or 0]
        return f"nobody new is let in, and open streams go on for {HELD_OVER_S:.0f} s at most: {advice}"

    def _current(self) -> _Snapshot:
        """Returns what the file holds now; raises OSError if the file cannot be read for the time being, because of an
        error in `_PASSING`."""
        try:
            read = self._snapshot
            if read.stamp != _stamp(os.stat(self._name)):
                with self._reloading:
                    read = self._reload()
        except OSError as exc:
            if exc.errno in _PASSING:
                raise
            read = self._snapshot = _NOTHING_READ  # Records read earlier must not count if a later read fails.
        self._seen_at = self._monotonic()
        self._spare.take_back()
        if read.records is None:
            self._note("is missing or malformed", "nobody is admitted: restore it from a backup")
        elif self._is_too_old(read):
            self._note("is too old", "nobody is admitted until there is a new one of `provider export-registry`")
        elif self._trouble is not None:
            self._note(None, "")
        return read

    def _reload(self) -> _Snapshot:
        try:
            return self._read()
        except OSError as exc:
            if exc.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            with self._spare.lent():
                return self._read()

    def _read(self) -> _Snapshot:
        with self._path.open("rb") as file:
            # The stamp is taken before reading, so that after a change during the read the next call reads again.
            stamp = _stamp(os.fstat(file.fileno()))
            if stamp == self._snapshot.stamp:
                return self._snapshot  # Another thread has read this version.
            data = file.read(MOST_BYTES + 1)
        read = _Snapshot(stamp, None)
        with contextlib.suppress(ValueError):
            if len(data) > MOST_BYTES:
                raise ValueError("too large for a registry")
            known, ends_at = self._read_records(data)
            left_s = 0.0 if ends_at is None else (ends_at - self._clock()).total_seconds()
            records = {int(record.serial, 16): record for record in known}
            read = _Snapshot(stamp, records, ends_at, self._monotonic() + left_s)
        self._snapshot = read
        return read

    def _note(self, trouble: str | None, consequence: str) -> None:
        """Logs one line if the problem with the registry file is new, and one line once the problem is over."""
        with self._noting:
            if trouble == self._trouble or (self._trouble or "").startswith(f"still {trouble}"):
                return
            self._trouble = trouble
        if trouble is None:
            _LOGGER.warning("%s can be read again", self._path.name)
        else:
            _LOGGER.error("%s %s: %s", self._path.name, trouble, consequence)


def _stamp(status: os.stat_result) -> _Stamp:
    # The change time is included since a restored copy can have the old size and modification time.
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)


def _own(data: bytes) -> tuple[list[TenantRecord], None]:
    """Reads a state directory's own registry, which never becomes too old."""
    return parse_records(data), None
