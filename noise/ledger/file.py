"""This module defines the file of a ledger. It encodes the file's records, adds them up, and reads, writes and locks
the file.

The file has lines of `CHECK JSON`. CHECK is SHA-256(previous CHECK ‖ JSON) cut to 64 bits, so that a record that is
lost, changed or moved in the middle is noticed. The first line names format, version and identity. A crash during a
write leaves a torn last record, which has no newline. The torn record is cut off. The count cannot become too low by
this, since `Ledger.reserve` returns only after write and fsync of the whole record, so no block of a torn record was
ever used. A complete last record with a wrong CHECK is damage. Its blocks may have been used, so the file is refused.
No secret is ever written: seeds are public.

This module guarantees nothing about which process may write when; noise/ledger/ledger.py does, and holds `exclusive`
while it writes.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from noise.disk.lock import locked
from wire.errors import ConfigurationError

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
        parameters: the parameter set, or the kind of one-time seed.
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
        """Returns the error for a file whose record `number` is damaged."""
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


def reserve_record(seed_id: str, num_blocks: int, what: str) -> dict[str, Any]:
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


def write_synced(fd: int, data: bytes) -> None:
    """Writes the bytes and returns when all of them are on the disk; raises OSError otherwise."""
    if os.write(fd, data) != len(data):  # A write is short only if the disk is full.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(fd)


def read_from(fd: int, offset: int) -> bytes:
    """Returns all bytes of a file from `offset` to its end."""
    parts = []
    while part := os.pread(fd, _READ_BYTES, offset):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def exclusive(path: Path) -> contextlib.AbstractContextManager[bool]:
    """Returns the lock of the ledger at `path`. The lock is a file next to the ledger."""
    return locked(path.with_name(path.name + ".lock"))
