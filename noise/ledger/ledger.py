"""This module implements the tenant's ledger. It ensures that no slot (one row of a mask) is used twice, and that no
seed serves more secrets than its parameters allow.

The ledger has two halves. On disk, `Ledger` keeps one file for a tenant identity. It holds the public seeds that were
drawn, and one fsynced record for each reservation *before* any of its blocks is used. In memory, `Slots`
(noise/blocks/slots.py) burns rows (marks them as used) before their bytes are sent. A mask gets rows by reserve →
`Reservation.open_block` → `Slots.take`, and each step can be taken only once for a block or row.

The file has lines of `CHECK JSON`. CHECK is SHA-256(previous CHECK ‖ JSON) cut to 64 bits, so that a record that is
lost, changed or moved in the middle is noticed. The first line names format, version and identity. A crash during a
write leaves a torn last record, which has no newline. The torn record is cut off. The count cannot become too low by
this, since `Ledger.reserve` returns only after write and fsync of the whole record, so no block of a torn record was
ever used. A complete last record with a wrong CHECK is damage. Its blocks may have been used, so the file is refused.
No secret is ever written: seeds are public.

Guarantees: the count on disk is never below the number of blocks handed out, whatever crashes (as long as fsync works).
Threads and processes that open the same file share one count and one current seed: `Ledger` holds `_exclusive` while it
writes. If a record cannot be made durable, the caller gets an error and no block. A forked child is refused. A ledger
and the blocks of a reservation can be neither pickled nor copied. A restart abandons what was reserved, since masks are
never serialised.

Not guaranteed: anything after the file is rolled back (an old backup, a restored snapshot of a virtual machine). Only a
process that still remembers higher counts notices this. Nothing is guaranteed on NFS and other network file systems,
where flock and rename are not dependable, or on Windows, which has no fcntl. The functions that read and write the file
do not lock it themselves. Deleting the file is safe, since a new ledger draws new seeds.
docs/decisions/0004-ledger.md has the reasons.
"""

from __future__ import annotations

import contextlib
import errno
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

from noise.blocks.slots import Origin, Slots
from noise.disk.private_files import locked, make_private_folder, sync_folder
from wire.errors import ConfigurationError, MaskError, MaskReused

VERSION = 1
MAGIC = b"veilbase-ledger"

_CHECK_CHARS = 16
_MAX_WHAT_CHARS = 200
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Seed:
    """Describes a public seed and what it has served. The last seed of a parameter set is the current one.

    Attributes:
        seed: 32 bytes; empty for `shares` and `pad`, for which each use has a seed of its own.
        seed_id: the name of the seed in reservations: a digest, or the kind of one-time seed.
        parameters: the parameter set, or the kind of one-time seed. Seeds whose hints the tenant computes are of a set
            of their own, so that none of them is ever sent to a provider.
        budget: the most secrets that the seed may serve; None for one-time seeds.
        used: the secrets that all processes have reserved so far, whether or not anything was sent under them.
        num_reservations: the number of records that `used` adds up.
        drawn_at: the Unix time, in seconds, at which the seed was drawn.
    """

    seed: bytes = field(repr=False)
    seed_id: str
    parameters: str
    budget: int | None
    used: int = 0
    num_reservations: int = 0
    drawn_at: int = field(default_factory=lambda: int(time.time()))


class Book:
    """Adds up the records of a ledger. A book reads no file itself: callers pass lines to `read`, and `seeds` holds the
    totals."""

    def __init__(self, name: str, identity: str) -> None:
        self._name, self._identity = name, identity
        self.seeds: dict[str, Seed] = {}
        self.reserve_bytes = 0
        # `mark` is one tuple, so that an interrupt cannot change only a part of it. At worst a record is counted twice.
        self.mark: tuple[int, bytes, int] = (0, MAGIC, 0)

    def read(self, data: bytes) -> None:
        """Adds the records of the complete lines in `data`, which follows the lines read so far; ignores a torn last
        line.

        Raises:
            ConfigurationError: a record is damaged, or the file is of another version or identity.
        """
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
        """Returns the last seed drawn for a parameter set and budget, or None if there is none. A seed of the set with
        another budget is from another release's table, and is not returned."""
        fitting = [seed for seed in self.seeds.values() if (seed.parameters, seed.budget) == (parameters, budget)]
        return fitting[-1] if fitting else None

    def is_ahead_of(self, other: Book) -> bool:
        """Tells whether `other` lacks records that this book has. If so, the file of `other` is an older state."""
        return any(
            seed_id not in other.seeds or other.seeds[seed_id].used < seed.used for seed_id, seed in self.seeds.items()
        )

    def compacted(self) -> list[dict[str, Any]]:
        """Returns the records of a shorter file with the same totals: a header, and one record for each seed."""
        return [header(self._identity), *(seed_record(seed) for seed in self.seeds.values())]


def header(identity: str) -> dict[str, Any]:
    """Returns the first record of a ledger file, which names the format's version and the identity."""
    return {"op": "ledger", "version": VERSION, "identity": identity}


def seed_record(seed: Seed) -> dict[str, Any]:
    """Returns the record of a seed and of the secrets reserved under the seed so far."""
    return {"op": "seed", "seed": {**vars(seed), "seed": seed.seed.hex()}}


def _reserve_record(seed_id: str, num_blocks: int, what: str) -> dict[str, Any]:
    """Returns the record that reserves blocks of a seed, with the process's id, the time and the purpose."""
    origin = {"pid": os.getpid(), "time": int(time.time())}
    return {"op": "reserve", "seed": seed_id, "blocks": num_blocks, "what": what[:_MAX_WHAT_CHARS], **origin}


def _check(chain: bytes, body: bytes) -> bytes:
    return hashlib.sha256(chain + body).hexdigest()[:_CHECK_CHARS].encode()


def encode(records: Iterable[dict[str, Any]], chain: bytes) -> bytes:
    """Encodes records as lines that follow the line whose CHECK is `chain`. The first line of a file follows MAGIC."""
    lines = []
    for record in records:
        body = json.dumps(record, separators=(",", ":")).encode()
        chain = _check(chain, body)
        lines.append(chain + b" " + body + b"\n")
    return b"".join(lines)


def _write_synced(fd: int, data: bytes) -> None:
    """Writes the bytes and returns when all of them are on the disk; raises OSError otherwise."""
    if os.write(fd, data) != len(data):  # A write is short only if the disk is full.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(fd)


def _read_from(fd: int, offset: int) -> bytes:
    """Returns all bytes of a file from `offset` to its end."""
    parts = []
    while part := os.pread(fd, _READ_BYTES, offset):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def _exclusive(path: Path) -> contextlib.AbstractContextManager[bool]:
    """Returns the lock of the ledger at `path`. The lock is a file next to the ledger."""
    return locked(path.with_name(path.name + ".lock"))


SEED_BYTES = 32
COMPACT_BYTES = 1 << 20
"""The number of bytes of reservation records above which the file is rewritten with totals in their place. These are
about 7,000 records, which take some 30 ms to parse at start."""
ONE_TIME_BATCH = 1024
"""How many one-time seeds one record counts, so that many calls share the cost of one fsync (milliseconds)."""

_SEED_ID_CHARS = 16


class SeedExhausted(MaskError):
    """The requested secrets would exceed the number that the seed may serve. The caller must call `Ledger.renew`."""


@dataclass(frozen=True)
class Reservation:
    """Identifies blocks of mask rows that the ledger has recorded as reserved and that are not used yet. `first_block`
    counts from 0 over the seed's whole life."""

    seed_id: str
    num_blocks: int
    what: str
    first_block: int
    _blocks: Slots = field(repr=False)

    def open_block(self, num_rows: int) -> Slots:
        """Opens the next block of the reservation and returns its slots, one for each of its `num_rows` rows.

        Raises:
            SlotsExhausted: every block of this reservation has been opened.
            MaskReused: this is a forked child.
        """
        self._blocks.take(1)
        return Slots(num_rows)


class Ledger:
    """Keeps the ledger file of one tenant identity; `Ledger.open` makes a ledger. A ledger is safe under threads and
    processes, and refuses a forked child."""

    def __init__(self, path: Path, identity: str, compact_bytes: int) -> None:
        self._path, self._identity, self._compact_bytes = path, identity, compact_bytes
        self._lock, self._batch_lock, self._origin = threading.Lock(), threading.Lock(), Origin()
        self._book = Book(str(path), identity)
        # The file stays open, so that no later file gets its inode number. A new inode number thus shows a compaction.
        self._fd = -1
        self._batches: dict[str, Slots] = {}

    @classmethod
    def open(cls, path: Path, identity: str, compact_bytes: int = COMPACT_BYTES) -> Ledger:
        """Opens the ledger, or starts a new one.

        Args:
            path: the file, on a local file system; `path` + `.lock` is made next to it and must stay there.
            identity: the name of the identity that owns the ledger.
            compact_bytes: see `COMPACT_BYTES`.

        Raises:
            ConfigurationError: the file is damaged, of another identity or version, open to other users, or not
                writable.
        """
        ledger = cls(Path(path), identity, compact_bytes)
        try:
            make_private_folder(ledger._path.parent)
            with _exclusive(ledger._path):
                if not ledger._path.exists():
                    ledger._replace_file([header(identity)])
                ledger._attach()
        except OSError as exc:
            raise ConfigurationError(f"the ledger {path} cannot be opened for writing: {exc.strerror}") from None
        return ledger

    def close(self) -> None:
        """Closes the file; later calls raise MaskError. In a forked child this does nothing."""
        # A forked child leaves the file alone: its copy of the lock may never be released.
        with contextlib.suppress(MaskReused):
            self._origin.check()
            with self._batch_lock, self._lock:
                self._batches.clear()  # These seeds stay counted, like every block that was not used.
                fd, self._fd = self._fd, -1
                if fd >= 0:
                    os.close(fd)

    def current_seed(self, parameters_name: str, max_secrets: int) -> Seed:
        """Returns the seed that every process of this identity uses now; draws one if no seed has room left.

        Args:
            parameters_name: the parameter set.
            max_secrets: the set's budget for each seed.

        Raises:
            MaskError, ConfigurationError: the ledger's file cannot be read or written.
        """
        with self._transaction() as book:
            seed = book.current(parameters_name, max_secrets)
            return self._draw(parameters_name, max_secrets) if seed is None or seed.used >= max_secrets else seed

    def known_seed(self, parameters_name: str, max_secrets: int) -> Seed | None:
        """Returns what `current_seed` would return without drawing; None if there is no seed, or none with room."""
        with self._transaction() as book:
            seed = book.current(parameters_name, max_secrets)
            return None if seed is None or seed.used >= max_secrets else seed

    def renew(self, seed_id: str) -> Seed:
        """Returns the seed that follows `seed_id`. The first caller draws the new seed, and all later callers get the
        same one."""
        with self._transaction() as book:
            old = self._known(seed_id)
            seed = book.current(old.parameters, old.budget)
            return self._draw(old.parameters, old.budget) if seed is None or seed.seed_id == seed_id else seed

    def reserve(self, seed_id: str, num_blocks: int, what: str) -> Reservation:
        """Puts blocks on record, durably, before any of them is used.

        Args:
            seed_id: a seed's id, from `current_seed` or `renew`.
            num_blocks: how many secrets to reserve; one record holds any number of them.
            what: a note for the audit trail, such as "forward, 210 groups"; never anything secret.

        Raises:
            SeedExhausted: the reservation would exceed what is left of the budget; nothing was reserved.
            MaskError: `num_blocks` is below 1 or above the whole budget, or the seed is unknown; nothing was reserved.
            MaskError, ConfigurationError: the record cannot be made durable; no block may be used.
        """
        if num_blocks < 1:  # A negative count would increase the budget.
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
        """Returns 32 new bytes of the operating system's CSPRNG, to be used once. Such seeds are counted durably,
        `ONE_TIME_BATCH` at a time.

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
        """Returns the totals of every seed of this identity, over all processes, in the order in which the seeds were
        drawn."""
        with self._transaction() as book:
            return list(book.seeds.values())

    def _reserve_one_time(self, kind: str) -> Slots:
        with self._transaction() as book:
            if kind not in book.seeds:
                self._append(seed_record(Seed(b"", kind, kind, None)))
        return self.reserve(kind, ONE_TIME_BATCH, "one-time seeds").open_block(ONE_TIME_BATCH)

    def _known(self, seed_id: str) -> Seed:
        seed = self._book.seeds.get(seed_id)
        if seed is None:
            raise MaskError(f"the ledger {self._path} has no seed {seed_id}: take one from current_seed")
        return seed

    def _draw(self, parameters: str, budget: int | None) -> Seed:
        seed = os.urandom(SEED_BYTES)
        drawn = Seed(seed, hashlib.sha256(seed).hexdigest()[:_SEED_ID_CHARS], parameters, budget)
        self._append(seed_record(drawn))
        return drawn

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Book]:
        """Locks out other threads and processes while the block runs, and first reads the records that they have
        written."""
        self._origin.check()  # This comes first, since a fork may have copied the lock in its locked state.
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
        """Opens the file that is now at `path` and reads all of it."""
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)  # Compaction would replace a link itself.
        try:
            if stat.S_IMODE(os.fstat(fd).st_mode) & 0o077:
                raise ConfigurationError(f"the ledger {self._path} is open to other users: chmod 600 it")
            book = Book(str(self._path), self._identity)
            book.read(_read_from(fd, 0))
            if not book.mark[0]:  # A new file gets its name when it is complete, so a missing header is damage.
                raise book.damaged(1)
            if self._book.is_ahead_of(book):
                raise self._went_back()
            # The process that renamed the file may have died before the folder was on disk. Records count only once the
            # folder is on disk.
            sync_folder(self._path.parent)
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
        """Writes and fsyncs one record. If this fails, the file either is unchanged or holds the record, which only
        makes the count too high."""
        offset, chain, _ = self._book.mark
        records, num_torn = [record], os.fstat(self._fd).st_size - offset
        if num_torn:
            os.ftruncate(self._fd, offset)
            records.insert(0, {"op": "torn", "bytes": num_torn, "time": int(time.time())})
        data = encode(records, chain)
        try:
            _write_synced(self._fd, data)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, offset)
            raise
        self._book.read(data)
        if self._book.reserve_bytes > self._compact_bytes:
            # The record is durable already. If compaction fails, a later append tries again.
            with contextlib.suppress(OSError):
                self._replace_file(self._book.compacted())
                self._attach()  # The next record belongs in the new file.

    def _replace_file(self, records: Iterable[dict[str, Any]]) -> None:
        """Replaces the ledger's file by a new one with these records. Every process notices the new inode number in
        `_catch_up`."""
        scratch = self._path.with_name(self._path.name + ".new")
        fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            os.fchmod(fd, 0o600)  # This overrides the umask and a leftover file's mode.
            _write_synced(fd, encode(records, MAGIC))
        finally:
            os.close(fd)
        os.replace(scratch, self._path)
        sync_folder(self._path.parent)

    def __reduce__(self) -> NoReturn:
        """Refuses to be copied or pickled."""
        self._origin.__reduce__()
