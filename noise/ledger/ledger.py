"""This module implements the tenant's ledger. It ensures that no slot (one row of a mask) is used twice, and that no
seed serves more secrets than its parameters allow.

The ledger has two halves. On disk, `Ledger` keeps one file for a tenant identity (noise/ledger/file.py). It holds the
public seeds that were drawn, and one fsynced record for each reservation *before* any of its blocks is used. In memory,
`Slots` (noise/blocks/slots.py) burns rows (marks them as used) before their bytes are sent. A mask gets rows by reserve
→ `Reservation.open_block` → `Slots.take`, and each step can be taken only once for a block or row.

Guarantees: the count on disk is never below the number of blocks handed out, whatever crashes (as long as fsync works).
Threads and processes that open the same file share one count and one current seed. If a record cannot be made durable,
the caller gets an error and no block. A forked child is refused. Nothing here can be pickled or copied. A restart
abandons what was reserved, since masks are never serialised.

The ledger guarantees nothing after the file is rolled back (an old backup, a restored snapshot of a virtual machine).
Only a process that still remembers higher counts notices this. It guarantees nothing on NFS and other network file
systems, where flock and rename are not dependable, or on Windows, which has no fcntl. Deleting the file is safe, since
a new ledger draws new seeds. docs/decisions/0004-ledger.md has the reasons.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from noise.blocks.slots import Origin, Slots
from noise.disk.durable import sync_folder
from noise.disk.private_files import make_private_folder
from noise.ledger import file
from noise.ledger.file import Book, Seed
from wire.errors import ConfigurationError, MaskError, MaskReused

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
            with file.exclusive(ledger._path):
                if not ledger._path.exists():
                    ledger._replace_file([file.header(identity)])
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
            self._append(file.reserve_record(seed_id, num_blocks, what))
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
                self._append(file.seed_record(Seed(b"", kind, kind, None)))
        return self.reserve(kind, ONE_TIME_BATCH, "one-time seeds").open_block(ONE_TIME_BATCH)

    def _known(self, seed_id: str) -> Seed:
        seed = self._book.seeds.get(seed_id)
        if seed is None:
            raise MaskError(f"the ledger {self._path} has no seed {seed_id}: take one from current_seed")
        return seed

    def _draw(self, parameters: str, budget: int | None) -> Seed:
        seed = os.urandom(SEED_BYTES)
        drawn = Seed(seed, hashlib.sha256(seed).hexdigest()[:_SEED_ID_CHARS], parameters, budget)
        self._append(file.seed_record(drawn))
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
                with file.exclusive(self._path):
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
            self._book.read(file.read_from(self._fd, offset))

    def _attach(self) -> None:
        """Opens the file that is now at `path` and reads all of it."""
        fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)  # Compaction would replace a link itself.
        try:
            if stat.S_IMODE(os.fstat(fd).st_mode) & 0o077:
                raise ConfigurationError(f"the ledger {self._path} is open to other users: chmod 600 it")
            book = Book(str(self._path), self._identity)
            book.read(file.read_from(fd, 0))
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
        data = file.encode(records, chain)
        try:
            file.write_synced(self._fd, data)
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
            file.write_synced(fd, file.encode(records, file.MAGIC))
        finally:
            os.close(fd)
        os.replace(scratch, self._path)
        sync_folder(self._path.parent)

    def __reduce__(self) -> NoReturn:
        """Refuses to be copied or pickled."""
        self._origin.__reduce__()
