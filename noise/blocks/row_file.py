"""This module keeps ready mask rows and their effects in an encrypted file (`pool="disk"`), and hands out each once.

A record is a few rows of one layer group and direction: their masks, then their effects, as the tensors' bytes. Only
records lie in the file. Where a record lies, its number and its authentication tag are in memory, so the file is of no
use to another process, and to no process once this one has ended.

Guarantees:
- masks and effects only are written, and nothing of them in plain: AES-256-GCM under a key that the operating system
  draws when the file is opened. The key is in memory only, and is overwritten when the file is closed. The nonce is the
  number of the record, which counts up and is never used twice under the key;
- a record is read at most once. It is marked as used before it is read, and stays so if reading it fails. Bytes that
  changed, that belong to another record, or that lay elsewhere in the file are an error: place, number, group,
  direction and shape are authenticated;
- the file has no name, its mode is 0600, and the folder has mode 0700. The file is not in memory (tmpfs), and all its
  space is reserved when it is opened, so that a full disk shows then;
- a forked child drops the key and its handle of the file, and can neither read nor write.

Not guaranteed: that a record's bytes are gone from the disk once it was read. They stay there, encrypted, until their
place is used again, and the key that opens them is in this process. A child that is forked while another thread
encrypts has a copy of that one operation's state. Swap is not covered.

Source: docs/decisions/0017-disk-pool.md.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import tempfile
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NoReturn

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from noise.blocks.arena import FreeRanges, arena
from noise.blocks.slots import Origin
from noise.disk.private_files import is_in_memory, make_private_folder
from wire.errors import ConfigurationError, MaskError, MaskReused, StorageError
from wire.frame import ITEM_BYTES, Direction

_KEY_BYTES = 32
_NONCE_BYTES = 12
_IDENTITY = struct.Struct(">QQQBQQQ")
"""What is authenticated beside a record's bytes: place, number, group, direction, rows, bytes of masks and of both."""
MOST_RECORD_ROWS = 16
"""The most rows of a record. A token of one sequence takes one row, so a record is read for every 16th token."""
HELD_BYTES = 128 << 20
"""The most bytes of masks and effects from the file that wait in memory, and so the size of one record of every layer
group and direction. A 7B model's rows have 7.4 MB in all groups together, so its records have 16 rows."""


@dataclass(frozen=True, eq=False)
class Record:
    """Says where a few rows lie in the file, and what they are. It holds nothing of the rows.

    Attributes:
        place: the number of its first byte in the file.
        number: how many records were written before it under the key; also its nonce.
        group, direction: whose rows they are.
        mask_form, effect_form: the type and shape of the two tensors.
        num_bytes: the bytes of both tensors together.
        tag: the authentication tag of AES-GCM.
    """

    place: int
    number: int
    group: int
    direction: Direction
    mask_form: tuple[torch.dtype, torch.Size]
    effect_form: tuple[torch.dtype, torch.Size]
    num_bytes: int
    tag: bytes = field(default=b"", repr=False)

    @property
    def num_rows(self) -> int:
        """Returns how many rows the record has."""
        return self.mask_form[1][0]

    @property
    def identity(self) -> bytes:
        """Returns the associated data of AES-GCM."""
        dtype, shape = self.mask_form
        mask_bytes = shape.numel() * dtype.itemsize
        return _IDENTITY.pack(
            self.place, self.number, self.group, self.direction, self.num_rows, mask_bytes, self.num_bytes
        )


class RowFile:
    """Holds one file of records and its key. It is safe under threads, and refuses a forked child."""

    def __init__(self, folder: Path, num_bytes: int, held_bytes: int = HELD_BYTES) -> None:
        """Opens the file and reserves its space.

        Args:
            folder: the folder on whose disk the file is made; it is made with mode 0700 if it is missing.
            num_bytes: the size of the file, which is the most that all records take together.
            held_bytes: the most bytes of rows from the file that a pool keeps in memory ahead of use.

        Raises:
            ConfigurationError: the folder is in memory, or open to other users.
            StorageError: the file cannot be made, or the disk has too little room.
        """
        self.folder, self.num_bytes, self.held_bytes = folder, num_bytes, held_bytes
        if is_in_memory(folder):
            raise ConfigurationError(
                f"pool='disk' keeps masks on a disk, and {folder} is memory (tmpfs): name a cache on a disk (cache= or "
                "VEILBASE_CACHE), or choose pool='memory' (--pool)"
            )
        file = self._open()
        self._key = bytearray(os.urandom(_KEY_BYTES))
        self._file = file
        self._end = weakref.finalize(self, _close, file, self._key)
        self._end.atexit = False  # A worker may still use the file then; the process's end closes it.
        self.reading, self.writing, self.places = threading.Lock(), threading.Lock(), threading.Lock()
        self._free = FreeRanges(num_bytes)
        self._unread: set[int] = set()
        self._num_records = 0
        self._read_buffer = self._write_buffer = memoryview(bytearray(0))
        self._origin = Origin()
        _FILES.add(self)

    def _open(self) -> IO[bytes]:
        try:
            make_private_folder(self.folder)
            found = os.stat(self.folder)
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise ConfigurationError(
                    f"pool='disk' needs a folder that is yours alone, and others may enter {self.folder}: chmod 700 it"
                )
            file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115 - `_close` closes it
        except OSError as exc:
            raise StorageError(
                f"pool='disk' cannot make its file in {self.folder} ({exc.strerror}): name another cache (cache= or "
                "VEILBASE_CACHE), or choose pool='memory' (--pool)"
            ) from None
        try:
            if self.num_bytes > 0:
                os.posix_fallocate(file.fileno(), 0, self.num_bytes)
        except OSError as exc:
            file.close()
            raise StorageError(
                f"expected {self.num_bytes / 1e6:.0f} MB of free disk for masks in {self.folder}, got none "
                f"({exc.strerror}): make room, set a smaller pool_bytes, or choose pool='memory' (--pool)"
            ) from None
        return file

    def rows_of_records(self, row_bytes: int) -> int:
        """Returns how many rows a record should have, so that one record of every group and direction fits into
        `held_bytes`.

        Args:
            row_bytes: the bytes of a row of mask and effect over all groups and directions; 0 if unknown.
        """
        return max(1, min(MOST_RECORD_ROWS, self.held_bytes // max(1, row_bytes)))

    # ---- write and read ---------------------------------------------------------------------------------------------

    def put(self, group: int, direction: Direction, mask: torch.Tensor, effect: torch.Tensor) -> Record | None:
        """Writes rows as one record; returns None, and writes nothing, if the file has no room for them. The caller
        must not use the rows afterwards.

        Args:
            group, direction: whose rows they are.
            mask, effect: any type, on the CPU, shape (rows, any columns) with at least one row.

        Raises:
            StorageError: the file cannot be written.
            MaskError: the file was closed, or this is a forked child (`MaskReused`).
        """
        self._origin.check()
        parts = bytes_of(mask), bytes_of(effect)
        num_bytes = sum(len(each) for each in parts)
        place = self._take_place(num_bytes)
        if place is None:
            return None
        try:
            with self.writing, self._usable("written"):
                number = self._num_records
                self._num_records += 1  # counted before the nonce is used, so that no error makes it be used twice
                forms = (mask.dtype, mask.shape), (effect.dtype, effect.shape)
                record = Record(place, number, group, direction, *forms, num_bytes)
                if len(self._write_buffer) < num_bytes:
                    self._write_buffer = memoryview(bytearray(num_bytes))
                encryptor = Cipher(algorithms.AES(self._key), modes.GCM(_nonce(number))).encryptor()
                encryptor.authenticate_additional_data(record.identity)
                begin = 0
                for part in parts:
                    begin += encryptor.update_into(part, self._write_buffer[begin : begin + len(part)])
                encryptor.finalize()
                write_all(self._file.fileno(), self._write_buffer[:num_bytes], place)
                self._unread.add(number)
            return Record(place, number, group, direction, *forms, num_bytes, encryptor.tag)
        except BaseException:
            self._give_back(place, num_bytes)
            raise

    def take(self, record: Record) -> tuple[torch.Tensor, torch.Tensor]:
        """Burns a record (marks it as used), then reads it. If reading fails, the record stays burnt.

        Returns:
            mask and effect, as they were given to `put`, in memory of the arena.

        Raises:
            MaskReused: the record was taken before, or this is a forked child.
            MaskError: the file was closed.
            StorageError: the file cannot be read, or its bytes are not those that were written.
        """
        self._burn(record)
        try:
            with self.reading, self._usable("read"):
                return self._read(record)
        finally:
            self._give_back(record.place, record.num_bytes)

    def drop(self, record: Record) -> None:
        """Burns a record without reading it, and frees its place."""
        self._burn(record)
        self._give_back(record.place, record.num_bytes)

    def _burn(self, record: Record) -> None:
        self._origin.check()
        try:
            self._unread.remove(record.number)  # one atomic step: of several threads, one gets the record
        except KeyError:
            self._check_open()
            raise MaskReused("a record of mask rows was about to be read twice: each may be taken once") from None

    def _read(self, record: Record) -> tuple[torch.Tensor, torch.Tensor]:
        num_bytes = record.num_bytes
        if len(self._read_buffer) < num_bytes:
            self._read_buffer = memoryview(bytearray(num_bytes))
        encrypted = self._read_buffer[:num_bytes]
        if not _read_all(self._file.fileno(), encrypted, record.place):
            raise StorageError(f"the file of masks in {self.folder} is damaged: it is too short. {_USED}")
        made = empty_rows(*record.mask_form), empty_rows(*record.effect_form)
        try:
            decryptor = Cipher(algorithms.AES(self._key), modes.GCM(_nonce(record.number), record.tag)).decryptor()
            decryptor.authenticate_additional_data(record.identity)
            begin = 0
            for each in made:
                part = bytes_of(each)
                begin += decryptor.update_into(encrypted[begin : begin + len(part)], part)
            decryptor.finalize()
        except InvalidTag:
            for each in made:  # What was not authenticated is not masks: nobody may see it.
                each.zero_()
            raise StorageError(
                f"the file of masks in {self.folder} is damaged: it gave back other bytes than were written. {_USED}"
            ) from None
        return made

    def _take_place(self, num_bytes: int) -> int | None:
        with self.places:
            found = self._free.fitting(num_bytes)
            if found is None:
                return None
            self._free.take(*found, num_bytes)
            return found[1]

    def _give_back(self, place: int, num_bytes: int) -> None:
        with self.places:
            self._free.give_back(place, place + num_bytes)

    @contextlib.contextmanager
    def _usable(self, done: str) -> Iterator[None]:
        """Checks that the file is open, and turns the operating system's errors into `StorageError`."""
        self._check_open()
        try:
            yield
        except OSError as exc:
            raise StorageError(
                f"the file of masks in {self.folder} cannot be {done} ({exc.strerror}): check that disk, or choose "
                "pool='memory' (--pool)"
            ) from None

    def _check_open(self) -> None:
        if not self._end.alive:
            raise MaskError("this mask was closed")

    # ---- end --------------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Returns whether the file was closed, and the key dropped."""
        return not self._end.alive

    def close(self) -> None:
        """Closes the file, which ends it, and overwrites the key. Waits for a record that is being read or written."""
        with self.reading, self.writing:
            self._end()
            self._unread.clear()

    def _forget_in_child(self) -> None:
        # Threads that held the old locks are not in this process.
        self.reading, self.writing, self.places = threading.Lock(), threading.Lock(), threading.Lock()
        self.close()

    def __reduce__(self) -> NoReturn:
        """Refuses to be copied or pickled."""
        self._origin.__reduce__()


_USED = "Its rows count as used, and the next call takes others"


def _close(file: IO[bytes], key: bytearray) -> None:
    key[:] = bytes(len(key))
    file.close()


def _nonce(number: int) -> bytes:
    return number.to_bytes(_NONCE_BYTES, "big")


def empty_rows(dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """Returns memory of the arena for a tensor, which must be overwritten."""
    num_bytes = shape.numel() * dtype.itemsize
    with torch.inference_mode(False):  # `mask` later adds to these tensors in place.
        whole = arena().rows(1, -(-num_bytes // ITEM_BYTES))  # (1, numbers of 4 bytes)
        return whole.view(-1).view(torch.uint8)[:num_bytes].view(dtype).view(shape)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor on the CPU; writing to them changes the tensor if it is contiguous."""
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def write_all(fd: int, data: memoryview, place: int) -> None:
    """Writes all of `data` to an open file, from byte `place` on. Raises OSError as `os.pwrite` does."""
    while data:
        written = os.pwrite(fd, data, place)
        data, place = data[written:], place + written


def _read_all(fd: int, into: memoryview, place: int) -> bool:
    """Fills a buffer from the file; returns False if the file ends before."""
    while into:
        count = os.preadv(fd, [into], place)
        if count == 0:
            return False
        into, place = into[count:], place + count
    return True


_FILES: weakref.WeakSet[RowFile] = weakref.WeakSet()


def _forget_in_child() -> None:
    for file in list(_FILES):
        file._forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)
