"""This module counts what a tenant used, by UTC day, and adds the counts to a file every minute and at the end. The
provider counts all its tenants with it, and a tenant counts itself, so that the two can be compared.

What both count is the same: a request counts once its reply is complete, with its rows and with the bytes of both
payloads, packed as they cross. So neither headers and handshakes, nor the manifest and the bundle, nor requests that
are refused, cancelled or too late count. A request that is sent again after a refusal counts once. The weight of a
group counts, as bytes, once all of it has come. The provider alone also counts a request that the tenant gives up
after a part of its reply has gone out (provider/net/requests.py), and the part of a weight that was sent.

Guarantees: saved counts survive a crash, since the file is replaced as a whole, with mode 0600, and synced to disk.
Processes that share a file add to the same counts. A file that cannot be read is an error, and does not count as empty.
If a save fails, for example because the disk is full, the failure is reported, and the next save adds the missing
counts. The file holds only numbers, dates and the names of tenants. Of each tenant it keeps the newest 400 days with
counts at most: beyond that, all days of the oldest month become one sum, and months are kept for good. A forked child
adds nothing, since its counts are also its parent's.

Not guaranteed: that both sides see the same. When a stream breaks or a deadline passes, replies that the provider has
counted may still be on their way. A day ends by the clock of the side that counts.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from runtime.files import create_file, sync_directory
from wire.call import Call, Direction, Purpose
from wire.errors import ConfigurationError, WireCode, os_cause

SAVE_S = 60.0
FILE_NAME = "usage.json"
MOST_DAYS = 400
"""The most days of one tenant that are kept apart: those of a year, and the time to settle its last bill."""
DAY_S = 86_400
_EPOCH = date(1970, 1, 1)
_Count = Annotated[int, Field(ge=0, lt=2**63)]
NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}( of [0-9a-f]{16})?$"
"""What names of accounts match: a tenant's name, at the tenant with the provider's authority."""
_Name = Annotated[str, Field(pattern=NAME_PATTERN)]
_Day = Annotated[date, Field(ge=_EPOCH, lt=date(3000, 1, 1))]
_Month = Annotated[str, Field(pattern=r"^(19[7-9]|2[0-9]{2})[0-9]-(0[1-9]|1[0-2])$")]
"""A month that has days of `_Day`."""
LOCK_S = 5.0
"""The most seconds that a save waits for another save, here or in another process, so that closing does not hang."""
_LOCK_LOOK_S = 0.02

KINDS = ("forward", "backward", "effect", "hint")
"""The kinds of requests by which a tenant counts. A provider counts by class of work, which depends on all that it has
to do, so that a tenant does not know the class of each request."""


def kind_of(call: Call) -> int:
    """Returns the index in `KINDS` of a call's kind."""
    if call.purpose is Purpose.PRODUCT:
        return 0 if call.direction is Direction.FORWARD else 1
    return 2 if call.purpose is Purpose.EFFECT else 3


class StreamTokens:
    """Counts the tokens of one stream: the rows of forward products of the layer group that has had most of them on
    this stream. That group sees each token of each pass, also if a tenant computes other groups itself. Of other
    requests none count. Rows of padding count too, since they are computed.

    Tenant and provider see the same streams, so both count the same. It is safe under threads.
    """

    def __init__(self) -> None:
        """Begins a stream on which nothing has been answered."""
        self._lock = threading.Lock()
        self._rows: dict[int, int] = {}
        self._most = 0

    def add(self, call: Call, num_rows: int) -> int:
        """Adds an answered request, and returns by how many tokens the count has risen."""
        if call.direction is not Direction.FORWARD or call.purpose is not Purpose.PRODUCT:
            return 0
        with self._lock:
            rows = self._rows[call.group] = self._rows.get(call.group, 0) + num_rows
            more = max(0, rows - self._most)
            self._most += more
            return more


class Usage(BaseModel):
    """Holds totals of one tenant's usage.

    Attributes:
        requests, rows, tokens: the number of requests that got a reply, of their rows, and of the tokens that these
            stand for (`StreamTokens`), by the name of the request's class or kind.
        bytes_up, bytes_down: the bytes in the payloads of these requests, and in the payloads of the replies.
        weight_bytes: the bytes of weights that were fetched, which `bytes_down` has too.
        seconds: the tenant's share of the time of products, in seconds; the time of a product that several tenants
            share is split by their rows. Of a small product that is computed beside a large one, the processor time
            counts. 0 where a tenant counts itself.
        errors: the number of requests that were refused or failed, by the name of the error's code. Empty where a
            tenant counts itself.
    """

    model_config = ConfigDict(extra="forbid")

    requests: dict[str, _Count] = Field(default_factory=dict)
    rows: dict[str, _Count] = Field(default_factory=dict)
    tokens: dict[str, _Count] = Field(default_factory=dict)
    bytes_up: _Count = 0
    bytes_down: _Count = 0
    weight_bytes: _Count = 0
    seconds: float = Field(default=0.0, ge=0, le=1e12, allow_inf_nan=False)
    errors: dict[str, _Count] = Field(default_factory=dict)

    def plus(self, more: Usage, sign: int = 1) -> Usage:
        """Returns the sum of these totals and `more`. With sign -1, returns the difference; `more` must then hold
        earlier totals of the same counts. A sum may pass the bounds of what can be saved, which `UsageBook.save` and
        `read_usage_file` check."""
        return Usage.model_construct(
            requests=_sum(self.requests, more.requests, sign),
            rows=_sum(self.rows, more.rows, sign),
            tokens=_sum(self.tokens, more.tokens, sign),
            bytes_up=self.bytes_up + sign * more.bytes_up,
            bytes_down=self.bytes_down + sign * more.bytes_down,
            weight_bytes=self.weight_bytes + sign * more.weight_bytes,
            seconds=max(0.0, self.seconds + sign * more.seconds),
            errors=_sum(self.errors, more.errors, sign),
        )

    @property
    def is_zero(self) -> bool:
        """Returns whether nothing was counted."""
        counts = (*self.requests.values(), *self.errors.values())
        return not any(counts) and not self.seconds and not self.weight_bytes


def _sum(one: dict[str, int], other: dict[str, int], sign: int) -> dict[str, int]:
    return {name: one.get(name, 0) + sign * other.get(name, 0) for name in sorted({*one, *other})}


def month_of(day: date) -> str:
    """Returns the month of a day, such as "2026-07"."""
    return day.isoformat()[:7]  # `strftime` does not pad years below 1000.


class Account(BaseModel):
    """Holds all usage of one tenant.

    Attributes:
        before: what was counted before days were, by an earlier release, which counted no tokens either.
        months: by month, such as "2026-07", the sum of days that are no longer kept apart.
        days: by UTC day, what was counted on it.
    """

    model_config = ConfigDict(extra="forbid")

    before: Usage = Field(default_factory=Usage)
    months: dict[_Month, Usage] = Field(default_factory=dict)
    days: dict[_Day, Usage] = Field(default_factory=dict)

    def total(self) -> Usage:
        """Returns the sum of all that was counted."""
        total = self.before
        for usage in (*self.months.values(), *self.days.values()):
            total = total.plus(usage)
        return total

    def add(self, day: date, usage: Usage) -> None:
        """Adds what was counted on a day."""
        month = month_of(day)
        if month in self.months:  # Its days were added up already.
            self.months[month] = self.months[month].plus(usage)
        else:
            self.days[day] = self.days.get(day, Usage()).plus(usage)

    def fold(self) -> None:
        """Adds up the days of the oldest months until at most `MOST_DAYS` are left."""
        while len(self.days) > MOST_DAYS:
            month = month_of(min(self.days))
            for day in [each for each in self.days if month_of(each) == month]:
                self.months[month] = self.months.get(month, Usage()).plus(self.days.pop(day))


class _FirstFile(BaseModel):
    """Is the file of releases that kept no days."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = 1
    tenants: dict[_Name, Usage] = Field(default_factory=dict)


class UsageFile(BaseModel):
    """Holds the accounts of all tenants, by name.

    Attributes:
        since: the UTC day on which days were first counted; None if none were yet.
        tenants: the accounts.
    """

    model_config = ConfigDict(extra="forbid")

    version: Literal[2]
    since: _Day | None
    tenants: dict[_Name, Account]


_FILE: TypeAdapter[_FirstFile | UsageFile] = TypeAdapter(_FirstFile | UsageFile)


class UsageCounter:
    """Counts one tenant's usage since the start of this process. This class is thread-safe."""

    def __init__(self, kinds: Sequence[str] = KINDS, now: Callable[[], float] = time.time) -> None:
        """Sets all counts to zero.

        Args:
            kinds: the names of the kinds by which requests are counted.
            now: returns the Unix time, in seconds.
        """
        self._kinds, self._now, self._stream = kinds, now, StreamTokens()
        self._lock = threading.Lock()
        self._requests, self._rows, self._tokens = ([0] * len(kinds) for _ in range(3))
        self._bytes_up = self._bytes_down = self._weight_bytes = 0
        self._seconds = 0.0
        self._errors: Counter[str] = Counter()
        self._day = int(now()) // DAY_S
        self._begun = self._total()
        """The totals when the present day began."""
        self._earlier: dict[int, Usage] = {}
        """What was counted on earlier days, unless `settle` was called for it."""

    def _on_this_day(self) -> None:
        """Begins another day if the present one has ended. Callers must hold the lock."""
        day = int(self._now()) // DAY_S
        if day != self._day:
            self._earlier, self._begun, self._day = self._days(), self._total(), day

    def answered(
        self, kind: int, call: Call, num_rows: int, bytes_up: int, bytes_down: int, stream: StreamTokens | None = None
    ) -> None:
        """Counts a request that got a reply.

        Args:
            kind: the index of its kind.
            call: its call.
            num_rows: the number of its rows.
            bytes_up, bytes_down: the bytes of its payload and of that of its reply.
            stream: the tokens of the stream that carried it; None if this counter is of one stream alone.
        """
        tokens = (stream or self._stream).add(call, num_rows)
        with self._lock:
            self._on_this_day()
            self._requests[kind] += 1
            self._rows[kind] += num_rows
            self._tokens[kind] += tokens
            self._bytes_up += bytes_up
            self._bytes_down += bytes_down

    def fetched(self, num_bytes: int) -> None:
        """Counts bytes of weights that the tenant fetched."""
        with self._lock:
            self._on_this_day()
            self._bytes_down += num_bytes
            self._weight_bytes += num_bytes

    def computed(self, seconds: float) -> None:
        """Adds the tenant's share of the time that a product took to compute, in seconds, to its usage."""
        with self._lock:
            self._on_this_day()
            self._seconds += seconds

    def failed(self, code: WireCode) -> None:
        with self._lock:
            self._on_this_day()
            self._errors[code.name] += 1

    def total(self) -> Usage:
        """Returns a copy of the totals since the start."""
        with self._lock:
            return self._total()

    def _total(self) -> Usage:
        return Usage(
            requests=dict(zip(self._kinds, self._requests, strict=True)),
            rows=dict(zip(self._kinds, self._rows, strict=True)),
            tokens=dict(zip(self._kinds, self._tokens, strict=True)),
            bytes_up=self._bytes_up,
            bytes_down=self._bytes_down,
            weight_bytes=self._weight_bytes,
            seconds=self._seconds,
            errors=dict(self._errors),
        )

    def by_day(self) -> dict[int, Usage]:
        """Returns what was counted on each day, by the day's number since 1970, without what `settle` has dropped."""
        with self._lock:
            return self._days()

    def _days(self) -> dict[int, Usage]:
        today = self._earlier.get(self._day, Usage()).plus(self._total().plus(self._begun, -1))
        return {**self._earlier, self._day: today}

    def settle(self, saved: dict[int, Usage]) -> set[int]:
        """Drops earlier days of which `saved` has all that was counted, so that they do not pile up. Returns them."""
        with self._lock:
            done = {day for day, usage in saved.items() if day != self._day and self._earlier.get(day) == usage}
            for day in done:
                del self._earlier[day]
            return done


def _signature(path: Path) -> tuple[int, ...] | None:
    """Returns what tells one version of a file from any other, or None if there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True)
class _Kept:
    """Holds what a usage file had after the last save, each account as JSON.

    The interpreter's lock is held while JSON is read or written. With a hundred tenants and 400 days each the file has
    12 MB, and to read and write it at once would stop all of a provider's threads for some tenths of a second. So it is
    read only after another process has changed it, and only accounts that change are made anew, one by one.
    """

    signature: tuple[int, ...] | None
    since: date | None
    accounts: dict[str, str]

    def is_of(self, path: Path) -> bool:
        """Returns whether the file is as it was."""
        return self.signature == _signature(path)

    @classmethod
    def read(cls, path: Path) -> _Kept:
        """Reads a file, as `read_usage_file` does."""
        signature, file = _signature(path), read_usage_file(path)
        accounts = {name: each.model_dump_json(exclude_defaults=True) for name, each in file.tenants.items()}
        return cls(signature, file.since, accounts)


class UsageBook:
    """Holds counters of usage, and adds their counts to a file."""

    def __init__(
        self,
        path: Path | None,
        kinds: Sequence[str],
        failed: Callable[[str], object],
        now: Callable[[], float] = time.time,
    ) -> None:
        """Makes a book without counters, and checks that the file can be read.

        Args:
            path: the file to which counts are added; None if counts are not to be saved.
            kinds: see `UsageCounter`.
            failed: called with a line about a save that failed.
            now: returns the Unix time, in seconds.

        Raises:
            ConfigurationError: the file exists, but is not a usage file or cannot be read.
        """
        self._path, self._kinds, self._failed, self._now = path, kinds, failed, now
        self._lock, self._saving = threading.Lock(), threading.Lock()
        self._closed = threading.Event()
        self._counters: dict[str, UsageCounter] = {}
        self._saved: dict[str, dict[int, Usage]] = {}
        self._kept = _Kept(None, None, {})
        self._pid = os.getpid()
        self.failed_saves = 0
        if path is not None:
            read_usage_file(path)

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

    def of(self, tenant: str) -> UsageCounter:
        """Returns the object that counts one tenant's usage; the first call for a tenant creates it with zero counts.
        The name of a tenant whose usage is saved has to match `NAME_PATTERN`."""
        with self._lock:
            known = self._counters.get(tenant)
            if known is None:
                known = self._counters[tenant] = UsageCounter(self._kinds, self._now)
            return known

    def _all(self) -> list[tuple[str, UsageCounter]]:
        with self._lock:
            return list(self._counters.items())

    def weights_saved(self, tenant: str, day: int) -> int:
        """Returns how many bytes of weights the file says that a tenant fetched on a day, by the day's number since
        1970; 0 without a file.

        Raises:
            ConfigurationError: the file cannot be read.
        """
        if self._path is None:
            return 0
        days = read_usage_file(self._path).tenants.get(tenant, Account()).days
        return days.get(_EPOCH + timedelta(days=day), Usage()).weight_bytes

    def totals(self) -> dict[str, Usage]:
        """Returns the totals since the start, by tenant's name."""
        return {name: counter.total() for name, counter in self._all()}

    def save(self) -> bool:
        """Adds the counts since the last save to the file and returns True; if this fails, reports it and returns
        False. Without a file, without new counts and in a forked child, does nothing and returns True. Waits for other
        saves for at most `LOCK_S`."""
        if self._path is None or os.getpid() != self._pid:
            return True
        until = time.monotonic() + LOCK_S
        if not self._saving.acquire(timeout=LOCK_S):
            return self._not_saved(f"usage could not be written to {self._path}: the save before has not ended")
        try:
            self._add_to(self._path, until)
        except OSError as exc:
            return self._not_saved(f"usage could not be written to {self._path}: {exc.strerror}")
        except ConfigurationError as exc:
            return self._not_saved(f"usage could not be added to: {exc}")
        except (ValidationError, ArithmeticError):  # pydantic's text quotes the account
            return self._not_saved(
                f"usage could not be added to {self._path}: a count or the day would be out of range; check the file "
                "and this machine's clock"
            )
        finally:
            self._saving.release()
        return True

    def _not_saved(self, line: str) -> bool:
        self.failed_saves += 1
        self._failed(line)
        return False

    def _add_to(self, path: Path, until: float) -> None:
        counters = self._all()
        now = {name: counter.by_day() for name, counter in counters}
        new = [
            (name, day, more)
            for name, days in now.items()
            for day, usage in days.items()
            if not (more := usage.plus(self._saved.get(name, {}).get(day, Usage()), -1)).is_zero
        ]
        if new:
            with _locked(path.with_suffix(".lock"), until):
                kept = self._kept if self._kept.is_of(path) else _Kept.read(path)
                since = kept.since or _EPOCH + timedelta(days=min(day for _, day, _ in new))
                accounts = dict(kept.accounts)
                for name in dict.fromkeys(name for name, _, _ in new):
                    account = Account.model_validate_json(accounts.get(name, "{}"))
                    for _, day, more in (each for each in new if each[0] == name):
                        account.add(_EPOCH + timedelta(days=day), more)
                    account.fold()
                    accounts[name] = account.model_dump_json(exclude_defaults=True)
                    Account.model_validate_json(accounts[name])  # What is written must be readable.
                lines = ",\n".join(f'"{name}":{text}' for name, text in accounts.items())
                _replace(path, f'{{"version":2,"since":"{since}","tenants":{{\n{lines}\n}}}}\n'.encode())
                # This is set before the directory is synced: if the sync fails, the counts must not be added twice.
                self._saved, self._kept = now, _Kept(_signature(path), since, accounts)
            sync_directory(path.parent)
        for name, counter in counters:
            for day in counter.settle(self._saved.get(name, {})):
                del self._saved[name][day]


def read_usage_file(path: Path) -> UsageFile:
    """Returns what a usage file holds, also one of an earlier release; no accounts if there is no file.

    Raises:
        ConfigurationError: the file is not a usage file, or cannot be read.
    """
    try:
        file = _FILE.validate_json(path.read_bytes())
    except FileNotFoundError:
        return UsageFile(version=2, since=None, tenants={})
    except (ValidationError, OSError) as exc:  # pydantic's text quotes the file, which names tenants
        raise ConfigurationError(
            f"{str(path)!r} cannot be read as usage: restore it, or move it away to begin at zero"
        ) from os_cause(exc)
    if isinstance(file, UsageFile):
        return file
    return UsageFile(version=2, since=None, tenants={name: Account(before=each) for name, each in file.tenants.items()})


def today() -> date:
    """Returns the present UTC day."""
    return datetime.now(UTC).date()


@contextmanager
def _locked(path: Path, until: float) -> Iterator[None]:
    """Holds the lock of a file; raises OSError if another process holds it until a time of `time.monotonic`."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise OSError(errno.EAGAIN, f"another process has locked {path.name} for {LOCK_S:.0f} s") from None
                time.sleep(_LOCK_LOOK_S)
        yield
    finally:
        os.close(fd)


def _replace(path: Path, data: bytes) -> None:
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)
    create_file(new, data)
    new.replace(path)
