"""This module writes a hint file that is not complete yet. It stores rows as they come, so that an interrupted fetch
continues from its last stored rows.

Guarantees: a hint file gets its final name only when every row, checksum and header byte is on the disk. A range of
rows counts as done only if its bytes match the checksum in the journal, which is written after the bytes have reached
the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from noise.disk.durable import sync_folder
from noise.hints.file import HEADER_BYTES, Layout, pack
from wire.errors import ConfigurationError, MaskError


@contextlib.contextmanager
def disk_errors(path: Path, needed_bytes: int) -> Iterator[None]:
    """Returns a context that turns an operating system's error into a ConfigurationError, whose one line says what to
    do."""
    try:
        yield
    except OSError as exc:
        raise ConfigurationError(
            f"cannot store {needed_bytes / 1e6:.0f} MB of hints in {path.parent}: {exc.strerror}; "
            "free some space, choose another folder, or use hints='stream'"
        ) from None


class PartFile:
    """Holds a hint that is being fetched: the file's tiles in a `.part` file, and a journal of complete row ranges.

    A journal line `[first, rows, crc32, verified]` is appended after the bytes of its range have reached the disk. If a
    line is torn, or a range's bytes do not fit the checksum, the range counts as missing. One process at a time uses a
    part file, under the caller's lock.
    """

    def __init__(self, path: Path, layout: Layout, verified: bool) -> None:
        """Opens or creates the file and allocates all of it, so that a full disk shows before anything is fetched.

        Args:
            path: the finished file's name.
            layout: the hint's shape and rounding.
            verified: whether the ranges written from now on have passed the session's check. If so, older ranges that
                have not passed a check count as missing; if not, the whole hint counts as unchecked.

        Raises:
            ConfigurationError: the disk is full or cannot be written. If the file could not be allocated or the journal
                not be read, both are removed, with the rows that an earlier attempt stored.
        """
        self._path, self._layout, self._verified = path, layout, verified
        self._part = path.with_suffix(".part")
        self._journal = path.with_suffix(".journal")
        with disk_errors(path, layout.file_bytes):
            self._handle = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # macOS lacks this function, so a full disk shows there only while rows are fetched.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self._handle, 0, layout.file_bytes)
                self._done = self._recall()
            except OSError:
                os.close(self._handle)
                self.delete()
                raise

    def __enter__(self) -> PartFile:
        """Returns this object; `__init__` has opened the file."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Closes the file; what has been written stays for the next attempt."""
        os.close(self._handle)

    def _recall(self) -> list[range]:
        if not self._journal.exists():
            return []
        done = []
        for line in self._journal.read_text(errors="replace").splitlines():
            entry = _parse(line)
            if entry is None or entry[0].stop > self._layout.rows or (self._verified and not entry[2]):
                continue
            rows, crc, _ = entry
            if self._crc(rows) == crc:
                done.append(rows)
        return done

    def missing(self) -> list[range]:
        """Returns the row ranges that are still to be fetched."""
        present = np.zeros(self._layout.rows + 2, dtype=np.int8)
        present[0] = present[-1] = 1
        for rows in self._done:
            present[rows.start + 1 : rows.stop + 1] = 1
        edges = np.flatnonzero(np.diff(present))
        return [range(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]

    def write(self, first_row: int, rows: torch.Tensor) -> None:
        """Rounds rows (int32, shape (num_rows, features)), stores them from `first_row` on and records them as done. A
        range that is the whole hint is not recorded in the journal, since no later attempt could use it."""
        layout, span = self._layout, range(first_row, first_row + rows.shape[0])
        crc = 0
        with disk_errors(self._path, layout.file_bytes):
            for tile in range(layout.num_tiles):
                columns = layout.columns(tile)
                part = rows[:, columns.start : columns.stop].contiguous().numpy()
                padding = layout.stored_width(tile) - len(columns)
                data = pack(np.pad(part, ((0, 0), (0, padding))) if padding else part, layout.dropped_bits)
                crc = zlib.crc32(data, crc)
                _write_all(self._handle, data, layout.span(tile, span)[0])
            self._done.append(span)
            if len(span) < layout.rows:  # A fetch of one range has nothing to resume from.
                os.fsync(self._handle)
                self._note(span, crc)

    def _note(self, span: range, crc: int) -> None:
        line = json.dumps([span.start, len(span), crc, self._verified])
        with open(self._journal, "a", opener=_private) as journal:
            journal.write(f"\n{line}\n")  # The newline in front separates it from a torn line.
            journal.flush()
            os.fsync(journal.fileno())

    def _crc(self, rows: range) -> int:
        crc = 0
        for tile in range(self._layout.num_tiles):
            offset, num_bytes = self._layout.span(tile, rows)
            crc = zlib.crc32(os.pread(self._handle, num_bytes, offset), crc)
        return crc

    def finish(self, key: Mapping[str, str]) -> None:
        """Adds checksums and header, and gives the file its final name.

        Args:
            key: the hint's key as the header states it; see `HintKey.metadata`.

        Raises:
            MaskError: rows are missing.
            ConfigurationError: the disk is full or cannot be written.
        """
        layout = self._layout
        if self.missing():
            raise MaskError("a hint was to be finished before all its rows were there")
        with disk_errors(self._path, layout.file_bytes):
            every = range(layout.rows)
            spans = (layout.span(tile, every) for tile in range(layout.num_tiles))
            sums = [zlib.crc32(os.pread(self._handle, num_bytes, offset)) for offset, num_bytes in spans]
            _write_all(self._handle, np.array(sums, dtype="<u4").tobytes(), HEADER_BYTES)
            _write_all(self._handle, layout.header(key, self._verified), 0)
            os.fsync(self._handle)
            self._part.rename(self._path)
            sync_folder(self._path.parent)
            self._journal.unlink(missing_ok=True)

    def delete(self) -> None:
        """Removes the part file and the journal."""
        self._journal.unlink(missing_ok=True)
        self._part.unlink(missing_ok=True)


def _parse(line: str) -> tuple[range, int, bool] | None:
    try:
        first, num_rows, crc, verified = json.loads(line)
    except (ValueError, TypeError):
        return None
    if not all(isinstance(number, int) and number >= 0 for number in (first, num_rows, crc)):
        return None
    return range(first, first + num_rows), crc, verified is True


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _write_all(handle: int, data: bytes, offset: int) -> None:
    """Writes all bytes. `os.pwrite` may write fewer bytes than it was given, above all on a disk that is nearly
    full."""
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written
