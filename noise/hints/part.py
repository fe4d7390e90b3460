"""A hint file that is not complete yet: rows are stored as they come, so that an interrupted fetch goes on where it
stopped.

Guarantees: a hint gets its name only when every row, checksum and header byte is on the disk; a range counts as done
only while its bytes fit the checksum that was noted after they had been synced.
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
    """Turns an operating system's error while writing into one line that says what to do."""
    try:
        yield
    except OSError as exc:
        raise ConfigurationError(
            f"cannot store {needed_bytes / 1e6:.0f} MB of hints in {path.parent}: {exc.strerror}; "
            "free some space, choose another folder, or use hints='stream'"
        ) from None


class PartFile:
    """A hint that is being fetched: the file's tiles under `.part`, and a journal of complete row ranges.

    A journal line `[first, rows, crc32, verified]` is appended after its bytes have reached the disk. A torn line, or a
    range whose bytes do not fit its checksum, counts as missing. One process at a time uses it, under the caller's
    lock.
    """

    def __init__(self, path: Path, layout: Layout, verified: bool) -> None:
        """Opens or creates the file; allocates all of it, so that a full disk shows before anything is fetched.

        Args:
            path: the finished file's name.
            layout: its shape and rounding.
            verified: whether ranges written now have passed a check; if so, older ones that have not count as missing,
                and if not, the hint counts as unchecked even where older ones have.

        Raises:
            ConfigurationError: the disk is full or cannot be written.
        """
        self._path, self._layout, self._verified = path, layout, verified
        self._part = path.with_suffix(".part")
        self._journal = path.with_suffix(".journal")
        with disk_errors(path, layout.file_bytes):
            self._handle = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # macOS has no such function: there a full disk shows while fetching.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self._handle, 0, layout.file_bytes)
                self._done = self._recall()
            except OSError:
                os.close(self._handle)
                self.delete()
                raise

    def __enter__(self) -> PartFile:
        """Returns itself, since `__init__` has opened the file."""
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
        """Rounds and stores rows, int32, shape (num_rows, features), and notes them as done."""
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
            if len(span) < layout.rows:  # A hint of one range has nothing to resume from.
                os.fsync(self._handle)
                self._note(span, crc)

    def _note(self, span: range, crc: int) -> None:
        line = json.dumps([span.start, len(span), crc, self._verified])
        with open(self._journal, "a", opener=_private) as journal:
            journal.write(f"\n{line}\n")  # The line stands alone, even after a torn one.
            journal.flush()
            os.fsync(journal.fileno())

    def _crc(self, rows: range) -> int:
        crc = 0
        for tile in range(self._layout.num_tiles):
            offset, num_bytes = self._layout.span(tile, rows)
            crc = zlib.crc32(os.pread(self._handle, num_bytes, offset), crc)
        return crc

    def finish(self, key: Mapping[str, str]) -> None:
        """Adds checksums and header, and gives the file its name.

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
        """Removes everything that this fetch has left."""
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
    """Writes all bytes: `os.pwrite` may write fewer than it was given, above all on a disk that is nearly full."""
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written
