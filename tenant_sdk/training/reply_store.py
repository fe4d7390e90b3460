"""This module keeps the provider's replies of a forward pass, in memory and on disk, until the backward pass.

Replies beyond a budget of memory go to a temporary file without a name, encrypted with AES-256-GCM, which
also detects changes. The replies are unmasked activations, so nobody who gets the disk may be able to read them.

Guarantees: the key is drawn from the operating system when a store is made, is only in memory, and is used by this
store alone. No nonce is used twice: the nonce is the number of the stored reply, which counts up. The file has no name
once it is open, so it disappears when the process ends. If stored bytes have changed, reading them is an error, so no
gradient is wrong. `reserve` takes the space on disk, so a full disk shows before a step and not during it. Not
guaranteed: that memory is not swapped out.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from noise.disk.private_files import make_private_folder
from wire.errors import StorageError

_PIECE_BYTES = 1 << 20
"""The bytes that are encrypted and written at a time, so that a reply of any size needs one small buffer."""
_KEY_BYTES = 32
_NONCE_BYTES = 12


class KeptReply(ABC):
    """Holds one stored reply, which `take` returns once. If this object is deleted, the store forgets the reply."""

    @abstractmethod
    def take(self) -> torch.Tensor:
        """Returns the reply, bit for bit as it was stored.

        Raises:
            StorageError: the file cannot be read, or its bytes have changed.
        """


class ReplyStore:
    """Keeps replies in memory up to a budget, and beyond the budget in an encrypted file."""

    def __init__(self, memory_bytes: int, folder: Path) -> None:
        """Makes an empty store; the file is made when it is first needed.

        Args:
            memory_bytes: the most bytes of replies in memory; with 0 all go to the file.
            folder: the folder on whose disk the file is made.
        """
        self._memory_bytes, self._folder = memory_bytes, folder
        self._in_memory = self._on_disk = 0  # bytes of the replies that are kept now; on disk, their number
        self._end = self._reserved = 0  # the file's next free byte, and its size
        self._extra_bytes = 0  # how many bytes `keep_extra` may still take
        self._num_records = 0
        self._key = os.urandom(_KEY_BYTES)
        self._file: IO[bytes] | None = None
        self._piece = bytearray(0)
        self._lock = threading.RLock()  # a dropped reply may free its place while this thread is in here

    def reserve(self, num_bytes: int, extra_bytes: int = 0) -> None:
        """Reserves space on disk for the part of a step's replies that does not fit into memory.

        Args:
            num_bytes: the bytes of the replies that the step will keep.
            extra_bytes: the bytes that `keep_extra` may take in this step, in addition.

        Raises:
            StorageError: the disk has no room for them.
        """
        with self._lock:
            self._extra_bytes = extra_bytes
            beyond = num_bytes + extra_bytes - (self._memory_bytes - self._in_memory)
            if beyond > 0:
                self._grow(self._end + beyond)

    def keep(self, reply: torch.Tensor) -> KeptReply:
        """Keeps a copy of a reply.

        Args:
            reply: any dtype, shape and device.

        Raises:
            StorageError: the disk has no room for it.
        """
        num_bytes = reply.numel() * reply.element_size()
        with self._lock:
            if self._in_memory + num_bytes <= self._memory_bytes:
                self._in_memory += num_bytes
                return _InMemory(self, reply.clone(), num_bytes)
            return self._write(reply, num_bytes)

    def keep_extra(self, tensor: torch.Tensor) -> KeptReply | None:
        """Keeps a copy of a tensor like a reply, if `reserve` left room for such tensors; returns None otherwise.

        Raises:
            StorageError: the file cannot be written.
        """
        num_bytes = tensor.numel() * tensor.element_size()
        with self._lock:
            if num_bytes > self._extra_bytes:
                return None
            self._extra_bytes -= num_bytes
            return self.keep(tensor)

    def _write(self, reply: torch.Tensor, num_bytes: int) -> _OnDisk:
        start, number = self._end, self._num_records
        self._grow(start + num_bytes)
        self._num_records += 1
        plain = _bytes_of(reply.detach().cpu())
        with self._disk() as file:
            encryptor = Cipher(algorithms.AES(self._key), modes.GCM(_nonce(number))).encryptor()
            for begin in range(0, num_bytes, _PIECE_BYTES):
                part = plain[begin : begin + _PIECE_BYTES]
                encryptor.update_into(part, self._piece)
                _write_all(file.fileno(), memoryview(self._piece)[: len(part)], start + begin)
            encryptor.finalize()
        self._end = start + num_bytes  # a reply that was dropped meanwhile may have set it to 0
        self._on_disk += 1
        return _OnDisk(self, number, start, encryptor.tag, reply)

    def read(self, number: int, start: int, tag: bytes, into: torch.Tensor) -> None:
        """Fills a tensor with a reply from the file.

        Args:
            number: the number of the reply, from which its nonce follows.
            start: the offset of its first byte in the file.
            tag: the authentication tag of AES-GCM.
            into: the tensor, of the reply's shape and dtype, on the CPU.

        Raises:
            StorageError: the file cannot be read, or its bytes are not those that were written.
        """
        plain = _bytes_of(into)
        with self._lock, self._disk() as file:
            decryptor = Cipher(algorithms.AES(self._key), modes.GCM(_nonce(number), tag)).decryptor()
            for begin in range(0, len(plain), _PIECE_BYTES):
                part = plain[begin : begin + _PIECE_BYTES]
                encrypted = memoryview(self._piece)[: len(part)]
                if os.preadv(file.fileno(), [encrypted], start + begin) != len(part):
                    raise StorageError(f"the store of replies in {self._folder} is damaged: its file is too short")
                decryptor.update_into(encrypted, part)
            try:
                decryptor.finalize()
            except InvalidTag:
                raise StorageError(
                    f"the store of replies in {self._folder} is damaged: it gave back other bytes than were written"
                ) from None

    def _grow(self, size: int) -> None:
        if size <= self._reserved:
            return
        with self._disk() as file:
            os.posix_fallocate(file.fileno(), 0, size)
        self._reserved = size

    @contextlib.contextmanager
    def _disk(self) -> Iterator[IO[bytes]]:
        """Yields the open file, and turns the operating system's errors into `StorageError`."""
        try:
            if self._file is None:
                make_private_folder(self._folder)
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - closed in `close`
                self._piece = bytearray(_PIECE_BYTES)
            yield self._file
        except (OSError, ValueError) as exc:  # ValueError: the file was closed
            reason = exc.strerror if isinstance(exc, OSError) else "it was closed"
            raise StorageError(
                f"the store of replies in {self._folder} cannot be used ({reason}): make room there, or choose "
                "another memory_budget_mb or checkpointing='recompute' (--memory-budget-mb, --checkpointing)"
            ) from None

    def forget(self, in_memory: int = 0, on_disk: int = 0) -> None:
        """Forgets replies that were taken or dropped: `in_memory` bytes in memory, and `on_disk` replies on disk."""
        with self._lock:
            self._in_memory -= in_memory
            self._on_disk -= on_disk
            if self._on_disk == 0:
                self._end = 0  # the next step writes from the file's beginning, under new nonces

    @property
    def bytes_on_disk(self) -> int:
        """Returns the size of the store's file."""
        return self._reserved

    def close(self) -> None:
        """Closes the file, which removes it, and drops the key; kept replies on disk are lost."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._key = b""


class _InMemory(KeptReply):
    def __init__(self, store: ReplyStore, reply: torch.Tensor, num_bytes: int) -> None:
        self._store, self._reply, self._num_bytes = store, reply, num_bytes

    def take(self) -> torch.Tensor:
        return self._reply

    def __del__(self) -> None:
        self._store.forget(in_memory=self._num_bytes)


class _OnDisk(KeptReply):
    def __init__(self, store: ReplyStore, number: int, start: int, tag: bytes, like: torch.Tensor) -> None:
        self._store, self._place = store, (number, start, tag)
        self._form: dict[str, Any] = {"dtype": like.dtype}
        self._shape, self._device = like.shape, like.device

    def take(self) -> torch.Tensor:
        reply = torch.empty(self._shape, **self._form)
        self._store.read(*self._place, reply)
        return reply.to(self._device)

    def __del__(self) -> None:
        self._store.forget(on_disk=1)


def _nonce(number: int) -> bytes:
    return number.to_bytes(_NONCE_BYTES, "big")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor on the CPU; writing to them changes the tensor if it is contiguous."""
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _write_all(fd: int, data: memoryview, start: int) -> None:
    while data:
        written = os.pwrite(fd, data, start)
        data, start = data[written:], start + written
