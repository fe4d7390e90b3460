"""The tenant's ledger: no mask slot is used twice, and no seed serves more secrets than its parameters allow.

Two halves. On disk, `Ledger` keeps one file for a tenant identity: the public seeds it drew, and one fsynced record a
reservation *before* any of its blocks is used. In memory, `Slots` burns rows before their bytes leave. Whoever wants
rows goes reserve → `Reservation.open_block` → `Slots.take`, and no step of that can be taken twice.

Guarantees: the count on disk is never below the number of blocks handed out, whatever crashes (proviso: fsync works);
threads and processes that open the same file share one count and one current seed; when a record cannot be made
durable, the caller gets an error and no block; a forked child is refused; nothing here can be pickled or copied. A
restart abandons what was reserved: masks are never serialised, so there is nothing to come back to.

Does not guarantee: anything after the file is rolled back (an old backup, a restored snapshot of a virtual machine;
only a process that still remembers higher counts notices); NFS and other network file systems (flock and rename are
not dependable there); Windows (no fcntl). Deleting the file is safe: another ledger draws other seeds.

The file: lines of `CHECK JSON`, CHECK being SHA-256(previous CHECK ‖ JSON) cut to 64 bits, so that a record lost,
changed or moved in the middle is seen. The first names format, version and identity. A torn last record, one without
its newline, is what a crash inside write leaves. It is cut off, which cannot under-count: `reserve` returns only after
write and fsync of the whole record, so no block of a torn one was ever used. A whole last record with a wrong CHECK is
damage, not tearing; it may have been used, so the file is refused. No secret is ever written: seeds are public.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from wire.errors import ConfigurationError, MaskError, MaskReused

VERSION = 1
SEED_BYTES = 32
COMPACT_BYTES = 1 << 20
"""Reservations are folded into totals above this size: about 7,000 records, parsed in some 30 ms at start."""
ONE_TIME_BATCH = 1024
"""One-time seeds counted by one record: one fsync (milliseconds) is spread over as many calls."""

_MAGIC = b"veilbase-ledger"
_CHECK_CHARS = 16
_SEED_ID_CHARS = 16
_MAX_WHAT_CHARS = 200

_num_forks = 0


def _forked() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(after_in_child=_forked)


class SeedExhausted(MaskError):
    """The seed has no room for that many more secrets: call `Ledger.renew`."""


class SlotsExhausted(MaskError):
    """The block has fewer unused rows than were asked for; none was burnt."""


class Origin:
    """The process something was made in; `check` refuses every other."""

    __slots__ = ("_num_forks", "_pid")

    def __init__(self) -> None:
        self._pid, self._num_forks = os.getpid(), _num_forks

    def check(self) -> None:
        """Raises MaskReused in a forked child: parent and child would hand out the same slots."""
        # the pid sees forks made by C code, the counter sees a child that has its parent's pid in a new namespace
        if self._num_forks != _num_forks or self._pid != os.getpid():
            raise MaskReused("masks made before a fork cannot be used in the child: make a new TenantClient there")

    def __reduce__(self) -> NoReturn:
        """Refuses copies and pickles of whatever holds this."""
        raise TypeError("mask slots and ledgers can be neither copied nor pickled: a copy would use its slots again")


class Slots:
    """The rows of one block, each handed out at most once. Safe under threads, dead in a forked child.

    Rows go in order, so that one number, the first unburnt row, is the whole state.
    """

    __slots__ = ("_lock", "_next", "_num_rows", "_origin")

    def __init__(self, num_rows: int) -> None:
        """Args: num_rows: rows of the block. Get one from `Reservation.open_block`, so that it is counted."""
        if num_rows < 0:
            raise MaskError(f"a block has at least 0 rows, got {num_rows}")
        self._num_rows, self._next = num_rows, 0
        self._lock, self._origin = threading.Lock(), Origin()

    @property
    def remaining(self) -> int:
        """Unburnt rows; another thread may take them before you do."""
        return self._num_rows - self._next

    def take(self, num_rows: int) -> range:
        """Burns the next rows and returns them.

        Raises:
            SlotsExhausted: fewer are left; nothing was burnt.
            MaskReused: in a forked child.
        """
        return self._take(num_rows, num_rows)

    def take_up_to(self, num_rows: int) -> range:
        """Burns as many of the next rows as there are, at most `num_rows`; an empty range when none is left."""
        return self._take(0, num_rows)

    def burn(self, row: int) -> None:
        """Burns one row by number and abandons the unburnt ones before it.

        Raises:
            MaskReused: the row is burnt already, or this is a forked child.
            SlotsExhausted: the block has no such row.
        """
        self._origin.check()
        with self._lock:
            if row < self._next:
                raise MaskReused(f"row {row} of this block has been used: a mask row is used once")
            if row >= self._num_rows:
                raise SlotsExhausted(f"the block has {self._num_rows} rows, row {row} was asked for")
            self._next = range(row, row + 1).stop  # range() refuses what is not an integer

    def _take(self, at_least: int, at_most: int) -> range:
        self._origin.check()
        if at_most < 0:  # would hand out burnt rows
            raise MaskError(f"a call takes at least 0 rows, got {at_most}")
        with self._lock:
            left = self._num_rows - self._next
            if left < at_least:
                raise SlotsExhausted(f"{at_least} mask rows were asked for and {left} are left in this block")
            rows = range(self._next, self._next + min(at_most, left))
            self._next = rows.stop  # burnt before the caller sees them
        return rows

    def __reduce__(self) -> NoReturn:
        """Refuses copies and pickles."""
        self._origin.__reduce__()


@dataclass(frozen=True)
class Seed:
    """A public seed and what it has served; the last one of a parameter set is the current one.

    Attributes:
        seed: 32 bytes; empty for `shares` and `pad`, where each use has a seed of its own.
        seed_id: names it in reservations: a digest, or the kind of one-time seed.
        parameters: the parameter set, or the kind of one-time seed.
        budget: the most secrets it may serve; None for one-time seeds.
        used: secrets reserved so far by all processes, whether or not they were sent.
        num_reservations: records that `used` adds up.
        drawn_at: Unix time, seconds.
    """

    seed: bytes = field(repr=False)
    seed_id: str
    parameters: str
    budget: int | None
    used: int = 0
    num_reservations: int = 0
    drawn_at: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True)
class Reservation:
    """Blocks on record and not yet used; `first_block` counts from 0 over the seed's whole life."""

    seed_id: str
    num_blocks: int
    what: str
    first_block: int
    _blocks: Slots = field(repr=False)

    def open_block(self, num_rows: int) -> Slots:
        """The slots of the next block, `num_rows` of them.

        Raises:
            SlotsExhausted: every block of this reservation has been opened.
            MaskReused: in a forked child.
        """
        self._blocks.take(1)
        return Slots(num_rows)


class _Book:
    """What the records say so far. Knows no file: lines in, totals out."""

    def __init__(self, name: str, identity: str) -> None:
        self._name, self._identity = name, identity
        self.seeds: dict[str, Seed] = {}
        self.reserve_bytes = 0
        # one tuple, so that an interrupt leaves it before or after a record: at worst one is counted twice
        self.mark: tuple[int, bytes, int] = (0, _MAGIC, 0)

    def read(self, data: bytes) -> None:
        """Takes in whole lines from `mark` on; leaves a torn last one alone."""
        *lines, _torn = data.split(b"\n")
        for line in lines:
            offset, chain, num_records = self.mark
            check, body = line[:_CHECK_CHARS], line[_CHECK_CHARS + 1 :]
            if line != check + b" " + body or check != _check(chain, body):
                raise self.damaged(num_records + 1)
            try:
                self._apply(json.loads(body), len(line), first=num_records == 0)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise self.damaged(num_records + 1) from None
            self.mark = (offset + len(line) + 1, check, num_records + 1)

    def damaged(self, number: int) -> ConfigurationError:
        """The one sentence about a file that cannot be trusted."""
        return ConfigurationError(
            f"the ledger {self._name} is damaged at record {number}: move it away, and the next start makes a new one "
            "with new seeds (nothing was sent)"
        )

    def _apply(self, record: dict[str, Any], num_bytes: int, *, first: bool) -> None:
        op = record["op"]
        if first != (op == "ledger"):
            raise ValueError
        if op == "ledger":
            self._check_header(record)
        elif op == "seed":
            seed = Seed(**{**record["seed"], "seed": bytes.fromhex(record["seed"]["seed"])})
            self.seeds[seed.seed_id] = seed
        elif op == "reserve":
            seed, num_blocks = self.seeds[record["seed"]], int(record["blocks"])
            used, num_reservations = seed.used + num_blocks, seed.num_reservations + 1
            self.seeds[seed.seed_id] = replace(seed, used=used, num_reservations=num_reservations)
            self.reserve_bytes += num_bytes
        elif op != "torn":
            raise ValueError

    def _check_header(self, record: dict[str, Any]) -> None:
        if record["version"] != VERSION:
            raise ConfigurationError(
                f"the ledger {self._name} has version {int(record['version'])} and this release reads {VERSION}: "
                "use the release that wrote it, or move it away"
            )
        if record["identity"] != self._identity:
            raise ConfigurationError(f"the ledger {self._name} belongs to another identity: give each its own")

    def current(self, parameters: str, budget: int | None) -> Seed | None:
        """The last seed drawn for a parameter set; another budget means another release's table, and its own seed."""
        fitting = [seed for seed in self.seeds.values() if (seed.parameters, seed.budget) == (parameters, budget)]
        return fitting[-1] if fitting else None

    def is_ahead_of(self, other: _Book) -> bool:
        """Whether `other` has forgotten something: a file that went back in time."""
        return any(
            seed_id not in other.seeds or other.seeds[seed_id].used < seed.used for seed_id, seed in self.seeds.items()
        )

    def compacted(self) -> list[dict[str, Any]]:
        """Records that say the same in one line a seed."""
        return [_header(self._identity), *(_seed_record(seed) for seed in self.seeds.values())]


class Ledger:
    """The file of one tenant identity, from `open`. Safe under threads and processes, dead in a forked child."""

    def __init__(self, path: Path, identity: str, compact_bytes: int) -> None:
        self._path, self._identity, self._compact_bytes = path, identity, compact_bytes
        self._lock, self._batch_lock, self._origin = threading.Lock(), threading.Lock(), Origin()
        self._book = _Book(str(path), identity)
        # held open, so that no later file can have the same inode number: a change of inode is a compaction
        self._fd = -1
        self._batches: dict[str, Slots] = {}

    @classmethod
    def open(cls, path: Path, identity: str, compact_bytes: int = COMPACT_BYTES) -> Ledger:
        """Opens the ledger, or starts one.

        Args:
            path: the file, on a local file system; `path` + `.lock` is made next to it and must stay there.
            identity: whose it is, as text.
            compact_bytes: bytes of reservations above which they are folded into totals.

        Raises:
            ConfigurationError: damaged, of another identity or version, open to other users, or not writable.
        """
        ledger = cls(Path(path), identity, compact_bytes)
        try:
            ledger._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with _exclusive(ledger._path):
                if not ledger._path.exists():
                    ledger._replace_file([_header(identity)])
                ledger._attach()
        except OSError as exc:
            raise ConfigurationError(f"the ledger {path} cannot be opened for writing: {exc.strerror}") from None
        return ledger

    def close(self) -> None:
        """Closes the file; whatever is asked afterwards is refused."""
        with contextlib.suppress(MaskReused):  # a forked child leaves it: the lock may have been copied while held
            self._origin.check()
            with self._lock:
                fd, self._fd = self._fd, -1
                if fd >= 0:
                    os.close(fd)

    def current_seed(self, parameters_name: str, max_secrets: int) -> Seed:
        """The seed that every process of this identity uses now; drawn when there is none with room left.

        Args:
            parameters_name: the parameter set.
            max_secrets: its budget per seed.

        Raises:
            MaskError, ConfigurationError: the file cannot be kept.
        """
        with self._transaction() as book:
            seed = book.current(parameters_name, max_secrets)
            return self._draw(parameters_name, max_secrets) if seed is None or seed.used >= max_secrets else seed

    def renew(self, seed_id: str) -> Seed:
        """The seed after `seed_id`: drawn by whoever asks first, the same for all who ask after."""
        with self._transaction() as book:
            old = self._known(seed_id)
            seed = book.current(old.parameters, old.budget)
            return self._draw(old.parameters, old.budget) if seed is None or seed.seed_id == seed_id else seed

    def reserve(self, seed_id: str, num_blocks: int, what: str) -> Reservation:
        """Puts blocks on record, durably, before any of them is used.

        Args:
            seed_id: from `current_seed` or `renew`.
            num_blocks: secrets; one record serves any number of them.
            what: for the audit trail, such as "forward, 210 groups"; never anything secret.

        Raises:
            SeedExhausted: the budget would be passed; nothing was reserved.
            MaskError, ConfigurationError: the record cannot be made durable; nothing was reserved.
        """
        if num_blocks < 1:  # a negative count would give budget back
            raise MaskError(f"a reservation is of at least 1 block, got {num_blocks}")
        with self._transaction():
            seed = self._known(seed_id)
            budget = num_blocks + seed.used if seed.budget is None else seed.budget
            if num_blocks > budget:
                raise MaskError(f"{num_blocks} blocks are more than a seed of {seed.parameters!r} may serve: {budget}")
            if seed.used + num_blocks > budget:
                raise SeedExhausted(
                    f"seed {seed_id} has served {seed.used} of {budget} secrets: {num_blocks} more do not fit"
                )
            self._append(_reserve_record(seed_id, num_blocks, what))
        return Reservation(seed_id, num_blocks, what, seed.used, Slots(num_blocks))

    def fresh_seed(self, kind: Literal["shares", "pad"]) -> bytes:
        """32 new bytes of the OS CSPRNG, to be used once; counted durably, `ONE_TIME_BATCH` at a time.

        Raises:
            MaskError, ConfigurationError: the count cannot be made durable.
        """
        self._origin.check()
        with self._batch_lock:
            batch = self._batches.get(kind)
            if batch is None or not batch.remaining:
                batch = self._batches[kind] = self._reserve_one_time(kind)
            batch.take(1)
        return os.urandom(SEED_BYTES)

    def audit(self) -> list[Seed]:
        """Totals of every seed of this identity, over all processes, in the order they were drawn."""
        with self._transaction() as book:
            return list(book.seeds.values())

    def _reserve_one_time(self, kind: str) -> Slots:
        with self._transaction() as book:
            if kind not in book.seeds:
                self._append(_seed_record(Seed(b"", kind, kind, None)))
        return self.reserve(kind, ONE_TIME_BATCH, "one-time seeds").open_block(ONE_TIME_BATCH)

    def _known(self, seed_id: str) -> Seed:
        seed = self._book.seeds.get(seed_id)
        if seed is None:
            raise MaskError(f"the ledger {self._path} has no seed {seed_id}: take one from current_seed")
        return seed

    def _draw(self, parameters: str, budget: int | None) -> Seed:
        seed = os.urandom(SEED_BYTES)
        drawn = Seed(seed, hashlib.sha256(seed).hexdigest()[:_SEED_ID_CHARS], parameters, budget)
        self._append(_seed_record(drawn))
        return drawn

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[_Book]:
        """Alone among threads and processes, with everything read that others wrote."""
        self._origin.check()  # before the lock: a fork may have copied it while it was held
        with self._lock:
            if self._fd < 0:
                raise MaskError("the ledger is closed")
            try:
                with _exclusive(self._path):
                    self._catch_up()
                    yield self._book
            except OSError as exc:
                raise MaskError(
                    f"the ledger {self._path} cannot be kept ({exc.strerror}): no mask was handed out"
                ) from None

    def _catch_up(self) -> None:
        mine, there = os.fstat(self._fd), os.stat(self._path)
        if not os.path.samestat(mine, there):
            self._attach()
            return
        offset = self._book.mark[0]
        if there.st_size < offset:
            raise self._went_back()
        if there.st_size > offset:
            self._book.read(_read_from(self._fd, offset))

    def _attach(self) -> None:
        """Opens the file that is at `path` now and reads all of it."""
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)  # a link would be replaced by compaction
        try:
            if stat.S_IMODE(os.fstat(fd).st_mode) & 0o077:
                raise ConfigurationError(f"the ledger {self._path} is open to other users: chmod 600 it")
            book = _Book(str(self._path), self._identity)
            book.read(_read_from(fd, 0))
            if not book.mark[0]:  # a new file appears whole, so one without a header is not torn but damaged
                raise book.damaged(1)
            if self._book.is_ahead_of(book):
                raise self._went_back()
            # whoever renamed it may have died before its folder was on disk; records in it count only after that
            _sync_folder(self._path.parent)
        except BaseException:
            os.close(fd)
            raise
        old, self._fd, self._book = self._fd, fd, book
        if old >= 0:
            os.close(old)

    def _went_back(self) -> MaskError:
        return MaskError(
            f"the ledger {self._path} was replaced by an older or another one while in use: move it away and restart"
        )

    def _append(self, record: dict[str, Any]) -> None:
        """Writes and fsyncs one record; on failure the file is as before, or holds it too (which over-counts)."""
        offset, chain, _ = self._book.mark
        records, num_torn = [record], os.fstat(self._fd).st_size - offset
        if num_torn:
            os.ftruncate(self._fd, offset)
            records.insert(0, {"op": "torn", "bytes": num_torn, "time": int(time.time())})
        data = _encode(records, chain)
        try:
            _write(self._fd, data)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, offset)
            raise
        self._book.read(data)
        if self._book.reserve_bytes > self._compact_bytes:
            # the record is durable already; a compaction that fails leaves a long file and is tried again
            with contextlib.suppress(OSError):
                self._replace_file(self._book.compacted())
                self._attach()  # what is appended next belongs there

    def _replace_file(self, records: Iterable[dict[str, Any]]) -> None:
        """Puts a whole new file in place; every process finds out by its inode in `_catch_up`."""
        scratch = self._path.with_name(self._path.name + ".new")
        fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            os.fchmod(fd, 0o600)  # whatever the umask, or the mode of one left by a crash
            _write(fd, _encode(records, _MAGIC))
        finally:
            os.close(fd)
        os.replace(scratch, self._path)
        _sync_folder(self._path.parent)

    def __reduce__(self) -> NoReturn:
        """Refuses copies and pickles."""
        self._origin.__reduce__()


def _header(identity: str) -> dict[str, Any]:
    return {"op": "ledger", "version": VERSION, "identity": identity}


def _seed_record(seed: Seed) -> dict[str, Any]:
    return {"op": "seed", "seed": {**vars(seed), "seed": seed.seed.hex()}}


def _reserve_record(seed_id: str, num_blocks: int, what: str) -> dict[str, Any]:
    origin = {"pid": os.getpid(), "time": int(time.time())}
    return {"op": "reserve", "seed": seed_id, "blocks": num_blocks, "what": what[:_MAX_WHAT_CHARS], **origin}


def _check(chain: bytes, body: bytes) -> bytes:
    return hashlib.sha256(chain + body).hexdigest()[:_CHECK_CHARS].encode()


def _encode(records: Iterable[dict[str, Any]], chain: bytes) -> bytes:
    lines = []
    for record in records:
        body = json.dumps(record, separators=(",", ":")).encode()
        chain = _check(chain, body)
        lines.append(chain + b" " + body + b"\n")
    return b"".join(lines)


def _write(fd: int, data: bytes) -> None:
    if os.write(fd, data) != len(data):  # short on a full disk only
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(fd)


def _read_from(fd: int, offset: int) -> bytes:
    parts = []
    while part := os.pread(fd, COMPACT_BYTES, offset):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Holds the lock file of a ledger: opened anew each time, so that no lock is shared by fork."""
    lock = path.with_name(path.name + ".lock")
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if _is_at(fd, lock):  # else someone removed it meanwhile, and others lock its successor
                yield
                return
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing does not unlock while a forked child holds the same file
            os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
