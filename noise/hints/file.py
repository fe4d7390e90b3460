"""This module defines the format of a hint file, reads such files, and writes a file whose rows come one after another.

A hint file is a safetensors file of rounded numbers in column tiles. It is mapped into memory and decoded chunk by
chunk (`MappedHint`). Until it is complete, a `PartFile` stores rows as they come, so that an interrupted fetch
continues from its last stored rows.

Layout: 4096 bytes of header, then `crc32` (U32, one for each tile), then `tiles` (U8). Tile i holds columns 64·i to
64·i + 63, row after row. Each number has 32 - t bits, little-endian; t is the number of low bits that were rounded
away. A chunk of columns is thus one contiguous read. If numbers share bytes (t = 10, 12), they form groups within one
row, and the last tile is padded to whole groups.

Guarantees: a hint file gets its final name only when every row, checksum and header byte is on the disk. A range of
rows counts as done only if its bytes match the checksum in the journal, which is written after the bytes have reached
the disk. noise/hints/store.py states further guarantees and limits.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from noise.disk.private_files import sync_folder
from noise.polynomial.kernels import LANES, PackedMatrix
from wire.errors import ConfigurationError, InvalidTensor, MaskError
from wire.limits import MAX_FEATURES

TILE_FEATURES = 64
"""How many columns a tile (a range of columns that is stored together) of a hint file has. This is close to the size of
the chunks in which effects are computed. Wider tiles would not decode faster; narrower tiles would decode slower."""
HEADER_BYTES = 4096
_CRC_BYTES = 4
_WORD_BITS = 32
_BYTE_BITS = 8
_MOST_ROWS = 1 << 16
_PACKED_AT_ONCE = 1 << 14
"""How many numbers are packed at a time: 64 KiB, which stays in the cache and below the size from which malloc takes
fresh pages."""
_GROUP = {0: 1, 8: 1, 10: 4, 12: 2}
"""Maps the number of dropped bits t to how many numbers fill whole bytes together: one number of 32 or 24 bits, four of
22 bits, two of 20 bits."""


@dataclass(frozen=True)
class Layout:
    """Describes the positions of one hint's numbers in its file.

    Attributes:
        rows: the number of rows of the hint, rank·N.
        features: the number of columns of the hint, which equals that of a reply.
        dropped_bits: t, the low bits of each number that are rounded away.
    """

    rows: int
    features: int
    dropped_bits: int

    def __post_init__(self) -> None:
        """Raises ConfigurationError for a rounding that does not exist, and InvalidTensor for an impossible shape."""
        if self.dropped_bits not in _GROUP:
            known = ", ".join(str(_WORD_BITS - dropped) for dropped in _GROUP)
            raise ConfigurationError(f"hints are stored with {known} bits, got {_WORD_BITS - self.dropped_bits}")
        if not (0 < self.rows <= _MOST_ROWS and 0 < self.features <= MAX_FEATURES):
            raise InvalidTensor(f"no hint has the shape ({self.rows}, {self.features})")

    @property
    def num_tiles(self) -> int:
        """Returns the number of column tiles; the last one may be narrower than the others."""
        return -(-self.features // TILE_FEATURES)

    def columns(self, tile: int) -> range:
        return range(tile * TILE_FEATURES, min((tile + 1) * TILE_FEATURES, self.features))

    def stored_width(self, tile: int) -> int:
        """Returns how many numbers a row of the tile has on disk, padding included."""
        group = _GROUP[self.dropped_bits]
        return -(-len(self.columns(tile)) // group) * group

    def row_bytes(self, tile: int) -> int:
        return self.stored_width(tile) * (_WORD_BITS - self.dropped_bits) // 8

    def span(self, tile: int, rows: range) -> tuple[int, int]:
        """Returns (offset in the file, number of bytes) of some rows of a tile, which are contiguous."""
        before = tile * self.rows * self.row_bytes(0)  # All tiles but the last are as wide as the first.
        start = HEADER_BYTES + self.num_tiles * _CRC_BYTES + before
        return start + rows.start * self.row_bytes(tile), len(rows) * self.row_bytes(tile)

    @property
    def file_bytes(self) -> int:
        return sum(self.span(self.num_tiles - 1, range(self.rows)))

    def header(self, key: Mapping[str, str], verified: bool) -> bytes:
        """Returns the file's first 4096 bytes. The same key, layout and `verified` always give the same bytes."""
        stated = {
            **key, "format": "veilbase-hint-1", "rows": str(self.rows), "features": str(self.features),
            "dropped_bits": str(self.dropped_bits), "tile_features": str(TILE_FEATURES),
            "verified": str(verified).lower(),
        }  # fmt: skip
        crc_bytes, data_bytes = self.num_tiles * _CRC_BYTES, self.file_bytes - HEADER_BYTES
        tiles_bytes = data_bytes - crc_bytes
        fields = {
            "__metadata__": stated,
            "crc32": {"dtype": "U32", "shape": [self.num_tiles], "data_offsets": [0, crc_bytes]},
            "tiles": {"dtype": "U8", "shape": [tiles_bytes], "data_offsets": [crc_bytes, data_bytes]},
        }
        text = json.dumps(fields, sort_keys=True).encode()
        return (HEADER_BYTES - 8).to_bytes(8, "little") + text.ljust(HEADER_BYTES - 8)


def _lanes(dropped_bits: int) -> Iterator[tuple[int, int, int]]:
    """Yields three values for each number of a group. They are the number's index in the group, the first byte of the
    four-byte word that ends in the same byte as the number, and the shift that aligns the number with the word's
    highest bits.

    The first word of a group may begin one byte before the group (-1). Decoding masks that byte off; encoding does not
    touch it.
    """
    bits = _WORD_BITS - dropped_bits
    for place in range(_GROUP[dropped_bits]):
        end_bits = (place + 1) * bits
        end_bytes = -(-end_bits // 8)
        yield place, end_bytes - 4, 8 * end_bytes - end_bits


def pack(numbers: npt.NDArray[np.int32], dropped_bits: int) -> bytes:
    """Rounds numbers to the nearest multiple of 2^t mod 2^32 (ties up) and returns them packed.

    Args:
        numbers: int32, shape (rows, width); the width is a multiple of `_GROUP[t]`, the count of
            numbers that are packed together.
        dropped_bits: t.

    Returns:
        rows · width · (32 - t) / 8 bytes.
    """
    packed = np.empty(numbers.size * (_WORD_BITS - dropped_bits) // 8, dtype=np.uint8)
    _pack_into(numbers, dropped_bits, packed)
    return packed.tobytes()


def _pack_into(numbers: npt.NDArray[np.int32], dropped_bits: int, out: npt.NDArray[np.uint8]) -> None:
    """Does what `pack` does, and writes the packed numbers to `out`. All other memory is small, since fresh pages would
    cost more time than the work.

    Args:
        numbers: as for `pack`; rows may be apart in memory.
        dropped_bits: t.
        out: uint8, contiguous, as many bytes as `pack` returns.
    """
    num_rows, width = numbers.shape
    group, half = _GROUP[dropped_bits], np.uint32((1 << dropped_bits) >> 1)
    packed = out.reshape(num_rows, -1)
    step = max(1, _PACKED_AT_ONCE // width)
    scratch = np.empty((min(step, num_rows), width), dtype="<u4")
    for first in range(0, num_rows, step):
        part = numbers[first : first + step].view(np.uint32)
        words = scratch[: len(part)]
        np.add(part, half, out=words)
        target = packed[first : first + len(part)]
        if group == 1:  # A number has whole bytes, of which the lowest are left out.
            kept = words.view(np.uint8).reshape(len(part), width, 4)[:, :, dropped_bits // 8 :]
            for byte in range(kept.shape[2]):
                target[:, byte :: kept.shape[2]] = kept[:, :, byte]
            continue
        words &= np.uint32(-1 << dropped_bits & 0xFFFFFFFF)
        groups = target.reshape(len(part), width // group, -1)
        groups[:] = 0
        for place, first_byte, shift in _lanes(dropped_bits):
            word_bytes = (words[:, place::group] >> np.uint32(shift)).view(np.uint8).reshape(*groups.shape[:2], 4)
            for byte in range(max(0, -first_byte), 4):
                groups[:, :, first_byte + byte] |= word_bytes[:, :, byte]


def unpack(buffer: Any, offset: int, row_bytes: int, out: npt.NDArray[np.int32], dropped_bits: int) -> None:
    """Unpacks all columns that `pack` has packed, or some of them.

    Args:
        buffer: an object with the buffer protocol; at least one byte lies before `offset`.
        offset: the byte at which the first wanted number of the first row begins. This number must be the first of a
            group.
        row_bytes: the bytes from one row to the next.
        out: int32, shape (rows, columns), for the numbers; columns is a multiple of `_GROUP[t]`. The low
            t bits become zero.
        dropped_bits: t.
    """
    group = _GROUP[dropped_bits]
    strides = (row_bytes, group * (_WORD_BITS - dropped_bits) // 8)
    shape = (out.shape[0], out.shape[1] // group)
    mask = np.int32(-1 << dropped_bits)
    for place, first_byte, shift in _lanes(dropped_bits):
        # These unaligned, overlapping words are read directly from the file, which is nine times as fast as copying
        # three bytes for each number.
        words: npt.NDArray[np.int32] = np.ndarray(shape, "<i4", buffer, offset + first_byte, strides)
        lane = out[:, place::group]
        if shift:
            np.left_shift(words, np.int32(shift), out=lane)
            words = lane
        np.bitwise_and(words, mask, out=lane)


class Hint(ABC):
    """Gives access to the hint H of one group and direction, on the CPU. It implements `Columns` of
    noise/polynomial/negacyclic.py. A hint is public.

    A reference to a hint keeps its memory alive, whatever the store's budget. A hint is safe under threads.
    """

    def __init__(self, layout: Layout, verified: bool, num_bytes: int) -> None:
        """Sets the hint's shape and properties.

        Args:
            layout: the hint's shape and rounding.
            verified: whether every fetched range of rows passed the session's check.
            num_bytes: the bytes that count against the store's RAM budget.
        """
        self.rows = layout.rows
        self.features = layout.features
        self.dropped_bits = layout.dropped_bits
        self.verified = verified
        self.num_bytes = num_bytes

    def load(self, start: int, stop: int) -> torch.Tensor:
        """Returns some columns, decoded. This is cheapest for multiples of 8 columns and for some dozens at a time.

        Returns:
            int32, shape (rank·N, stop - start), contiguous, the caller's own.

        Raises:
            InvalidTensor: the hint does not have these columns.
            MaskError: a tile fails its checksum.
        """
        if not 0 <= start < stop <= self.features:
            raise InvalidTensor(f"a hint of {self.features} features has no columns {start} to {stop}")
        return self._load(start, stop)

    def packed(self, start: int, stop: int) -> PackedMatrix | None:
        """Returns the whole hint as it is stored, for products with the compiled code of noise/polynomial/kernels.py,
        after the checksums of the given columns have been verified; None if this hint is not stored in the form that
        the code reads. A tile that fails its checksum raises MaskError."""
        return None

    @abstractmethod
    def _load(self, start: int, stop: int) -> torch.Tensor: ...


class MappedHint(Hint):
    """Reads a complete hint file that is mapped into memory. Each tile's checksum is verified when the tile is first
    used."""

    def __init__(self, path: Path, layout: Layout, verified: bool, file: mmap.mmap) -> None:
        """Wraps a mapped file whose size and header `open` has checked."""
        super().__init__(layout, verified, layout.file_bytes)
        self._path = path
        self._layout = layout
        self._file = file
        self._bytes = np.frombuffer(file, dtype=np.uint8)
        self._checked = bytearray(layout.num_tiles)
        is_packed = layout.dropped_bits == _BYTE_BITS and layout.features % LANES == 0
        first, _ = layout.span(0, range(0))
        self._packed = (
            PackedMatrix(self._bytes, first, layout.rows, layout.features, TILE_FEATURES) if is_packed else None
        )

    @classmethod
    def open(cls, path: Path, layout: Layout, key: Mapping[str, str]) -> MappedHint | None:
        """Maps a hint file into memory; returns None if the file does not exist.

        Raises:
            MaskError: the file's size or header is not that of this key and layout.
            ConfigurationError: the file cannot be read.
        """
        try:
            with path.open("rb") as handle:
                size = os.fstat(handle.fileno()).st_size
                if size != layout.file_bytes:
                    raise _damaged(path, f"it has {size} bytes instead of {layout.file_bytes}")
                file = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as exc:
            raise ConfigurationError(f"cannot read the hint file {path}: {exc.strerror}") from None
        for verified in (True, False):
            if file[:HEADER_BYTES] == layout.header(key, verified):
                return cls(path, layout, verified, file)
        raise _damaged(path, "its header is of another model, seed or setting, or broken")

    def _load(self, start: int, stop: int) -> torch.Tensor:
        group = _GROUP[self.dropped_bits]
        first, last = start // group * group, -(-stop // group) * group
        numbers = np.empty((self.rows, last - first), dtype=np.int32)
        for tile in range(first // TILE_FEATURES, -(-last // TILE_FEATURES)):
            begin = tile * TILE_FEATURES
            left, right = max(first, begin), min(last, begin + TILE_FEATURES)
            self._decode(tile, left - begin, numbers[:, left - first : right - first])
        return torch.from_numpy(numbers)[:, start - first : stop - first].contiguous()

    def packed(self, start: int, stop: int) -> PackedMatrix | None:
        """Returns the whole hint as it lies in the file, after the tiles of some columns have been checked; None if its
        numbers do not have three bytes each, or its columns are no multiple of four."""
        if self._packed is not None:
            for tile in range(start // TILE_FEATURES, -(-stop // TILE_FEATURES)):
                if not self._checked[tile]:
                    self._check(tile, *self._layout.span(tile, range(self.rows)))
        return self._packed

    def _decode(self, tile: int, column: int, out: npt.NDArray[np.int32]) -> None:
        """Fills `out` with the columns of a tile, starting from `column`."""
        layout = self._layout
        offset, num_bytes = layout.span(tile, range(layout.rows))
        if not self._checked[tile]:
            self._check(tile, offset, num_bytes)
        offset += column * (_WORD_BITS - layout.dropped_bits) // 8
        unpack(self._file, offset, layout.row_bytes(tile), out, layout.dropped_bits)

    def _check(self, tile: int, offset: int, num_bytes: int) -> None:
        at = HEADER_BYTES + tile * _CRC_BYTES
        with memoryview(self._file) as view, view[offset : offset + num_bytes] as data:
            if zlib.crc32(data) != int.from_bytes(view[at : at + _CRC_BYTES], "little"):
                raise _damaged(self._path, f"tile {tile} fails its checksum")
        self._checked[tile] = 1


def _damaged(path: Path, why: str) -> MaskError:
    return MaskError(f"the hint file {path} cannot be used: {why}; delete it, and it will be made again")


ELSEWHERE = "free some space, choose another folder, or use hints='stream'"
"""What a user may do whose disk has no room for hints."""


@contextlib.contextmanager
def disk_errors(path: Path, needed_bytes: int) -> Iterator[None]:
    """Returns a context that turns an operating system's error into a ConfigurationError, whose one line says what to
    do."""
    try:
        yield
    except OSError as exc:
        raise ConfigurationError(
            f"cannot store {needed_bytes / 1e6:.0f} MB of hints in {path.parent}: {exc.strerror}; {ELSEWHERE}"
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
        crc, is_part = 0, len(span) < layout.rows  # A fetch of one range has nothing to resume from.
        packed = np.empty(len(span) * layout.row_bytes(0), dtype=np.uint8)
        with disk_errors(self._path, layout.file_bytes):
            for tile in range(layout.num_tiles):
                columns = layout.columns(tile)
                part = rows[:, columns.start : columns.stop].numpy()
                padding = layout.stored_width(tile) - len(columns)
                data = packed[: len(span) * layout.row_bytes(tile)]
                _pack_into(np.pad(part, ((0, 0), (0, padding))) if padding else part, layout.dropped_bits, data)
                if is_part:
                    crc = zlib.crc32(data.data, crc)
                _write_all(self._handle, data.data, layout.span(tile, span)[0])
            self._done.append(span)
            if is_part:
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


def _write_all(handle: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all bytes. `os.pwrite` may write fewer bytes than it was given, above all on a disk that is nearly
    full."""
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written
