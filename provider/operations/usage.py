"""Counts each tenant's usage in memory, and adds the counts to a file every minute and at the end.

Guarantees: saved counts survive a crash, since the file is replaced as a whole and synced to disk. Providers that share
a state directory add to the same counts. A file that cannot be read is an error, and does not count as empty. If a save
fails, for example because the disk is full, the failure is logged, tenants are still served, and the next save adds the
missing counts. The file holds only numbers and the names of tenants.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from provider.identity.authority import TENANT_NAME_PATTERN, create_file, sync_directory
from provider.schedule.ticket import RequestClass
from wire.errors import ConfigurationError, WireCode, os_cause

SAVE_S = 60.0
FILE_NAME = "usage.json"
_Count = Annotated[int, Field(ge=0)]
_LOGGER = logging.getLogger(__name__)


class Usage(BaseModel):
    """Holds the totals of one tenant's usage.

    Attributes:
        requests, rows: the number of requests that got a reply, and the number of their rows, by the name of the
            request's class.
        bytes_up, bytes_down: the bytes in the payloads of these requests, and in the payloads of the replies.
        seconds: the tenant's share of the time of products, in seconds; the time of a product that several tenants
            share is split by their rows. Of a small product that is computed beside a large one, the processor time
            counts.
        errors: the number of requests that were refused or failed, by the name of the error's code.
    """

    model_config = ConfigDict(extra="forbid")

    requests: dict[str, _Count] = Field(default_factory=dict)
    rows: dict[str, _Count] = Field(default_factory=dict)
    bytes_up: _Count = 0
    bytes_down: _Count = 0
    seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    errors: dict[str, _Count] = Field(default_factory=dict)

    def plus(self, more: Usage, sign: int = 1) -> Usage:
        """Returns the sum of these totals and `more`. With sign -1, returns the difference; `more` must then hold
        earlier totals of the same counts."""
        return Usage(
            requests=_sum(self.requests, more.requests, sign),
            rows=_sum(self.rows, more.rows, sign),
            bytes_up=self.bytes_up + sign * more.bytes_up,
            bytes_down=self.bytes_down + sign * more.bytes_down,
            seconds=max(0.0, self.seconds + sign * more.seconds),
            errors=_sum(self.errors, more.errors, sign),
        )


def _sum(one: dict[str, int], other: dict[str, int], sign: int) -> dict[str, int]:
    return {name: one.get(name, 0) + sign * other.get(name, 0) for name in sorted({*one, *other})}


class _UsageFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: Annotated[int, Field(ge=1, le=1)] = 1
    tenants: dict[Annotated[str, Field(pattern=TENANT_NAME_PATTERN)], Usage] = Field(default_factory=dict)


class TenantUsage:
    """Counts one tenant's usage since the provider's start. This class is thread-safe."""

    def __init__(self) -> None:
        """Sets all usage counters to zero."""
        self._lock = threading.Lock()
        self._requests, self._rows = [0] * len(RequestClass), [0] * len(RequestClass)
        self._bytes_up = self._bytes_down = 0
        self._seconds = 0.0
        self._errors: Counter[str] = Counter()

    def answered(self, request_class: RequestClass, num_rows: int, bytes_up: int, bytes_down: int) -> None:
        """Counts a request that got a reply: its rows, and the bytes of both payloads."""
        with self._lock:
            self._requests[request_class] += 1
            self._rows[request_class] += num_rows
            self._bytes_up += bytes_up
            self._bytes_down += bytes_down

    def computed(self, seconds: float) -> None:
        """Adds the tenant's share of the time that a product took to compute, in seconds, to its usage."""
        with self._lock:
            self._seconds += seconds

    def failed(self, code: WireCode) -> None:
        with self._lock:
            self._errors[code.name] += 1

    def total(self) -> Usage:
        """Returns a copy of the tenant's totals since the provider's start."""
        with self._lock:
            return Usage(
                requests={one.name.lower(): self._requests[one] for one in RequestClass},
                rows={one.name.lower(): self._rows[one] for one in RequestClass},
                bytes_up=self._bytes_up,
                bytes_down=self._bytes_down,
                seconds=self._seconds,
                errors=dict(self._errors),
            )


class UsageBook:
    """Holds the usage counts of all tenants since the provider's start, and adds these counts to a file."""

    def __init__(self, path: Path | None = None) -> None:
        """Sets all tenants' counts to zero, and checks that the file can be read.

        Args:
            path: the file to which counts are added; None if counts are not to be saved.

        Raises:
            ConfigurationError: the file exists, but is not a usage file or cannot be read.
        """
        self._path = path
        self._lock, self._saving = threading.Lock(), threading.Lock()
        self._closed = threading.Event()
        self._tenants: dict[str, TenantUsage] = {}
        self._saved: dict[str, Usage] = {}
        self.failed_saves = 0
        if path is not None:
            read_usage(path)

    def keep_saving(self) -> None:
        """Starts a thread that saves the counts every minute until `close` is called."""
        threading.Thread(target=self._save_now_and_then, name="veilbase-usage", daemon=True).start()

    def _save_now_and_then(self) -> None:
        while not self._closed.wait(SAVE_S):
            self.save()

    def close(self) -> None:
        """Ends the thread that `keep_saving` started, and saves the counts once more."""
        self._closed.set()
        self.save()

    def of(self, tenant: str) -> TenantUsage:
        """Returns the object that counts one tenant's usage; the first call for a tenant creates it with zero
        counts."""
        with self._lock:
            known = self._tenants.get(tenant)
            if known is None:
                known = self._tenants[tenant] = TenantUsage()
            return known

    def totals(self) -> dict[str, Usage]:
        """Returns the totals since the provider's start, by tenant's name."""
        with self._lock:
            tenants = list(self._tenants.items())
        return {name: usage.total() for name, usage in tenants}

    def save(self) -> bool:
        """Adds the counts since the last save to the file and returns True; if this fails, logs an error and returns
        False. Without a file, does nothing and returns True."""
        if self._path is None:
            return True
        with self._saving:
            now = self.totals()
            try:
                with _locked(self._path.with_suffix(".lock")):
                    account = read_usage(self._path)
                    for name, total in now.items():
                        new = total.plus(self._saved.get(name, Usage()), -1)
                        account[name] = account.get(name, Usage()).plus(new)
                    _replace(self._path, _UsageFile(tenants=account).model_dump_json(indent=1).encode())
                    # This is set before the directory is synced: if the sync fails, the counts must not be added twice.
                    self._saved = now
                sync_directory(self._path.parent)
            except OSError as exc:
                self.failed_saves += 1
                _LOGGER.error("usage could not be written to %s: %s", self._path, exc.strerror)
                return False
            except ConfigurationError as exc:
                self.failed_saves += 1
                _LOGGER.error("usage could not be added to: %s", exc)
                return False
        return True


def read_usage(path: Path) -> dict[str, Usage]:
    """Returns the totals in a usage file, by tenant's name; an empty dict if there is no file.

    Raises:
        ConfigurationError: the file is not a usage file, or cannot be read.
    """
    try:
        return _UsageFile.model_validate_json(path.read_bytes()).tenants
    except FileNotFoundError:
        return {}
    except (ValidationError, OSError) as exc:  # pydantic's text quotes the file, which names tenants
        raise ConfigurationError(
            f"{str(path)!r} cannot be read as usage: restore it, or move it away to begin at zero"
        ) from os_cause(exc)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _replace(path: Path, data: bytes) -> None:
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    create_file(new, data)
    new.replace(path)
