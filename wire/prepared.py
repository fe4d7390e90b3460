"""This module defines the prepared store: a file with a checkpoint's int8 weights, layer by layer, which is mapped into
memory instead of being computed again from the checkpoint.

The layout of a store file, whose numbers are little-endian:

    data            arrays and blobs, each at a multiple of 64 bytes
    header          JSON: the key, the layers (kind, shape, digest, offsets), the blobs (offset, size) and the facts
    header's size   8 bytes
    magic           24 bytes
    SHA-256         32 bytes, of all bytes before them

A layer holds W̃ (int8, row-major), α (float32), and the sums of the squares of W̃'s rows and columns (float64), from
which the norms of any group of layers follow. Blobs and facts belong to the code that makes the store.

Guarantees: `open_store` gives a store only if its folder and its file belong to this user, no other user may read or
write them, neither is a link, the SHA-256 of the mapped bytes is right, and its key (the SHA-256 of the checkpoint's
files, the quantiser's version and the versions of the code that read the checkpoint) is the expected one. Nothing is
parsed before that. A store appears under its name as a whole or not at all, so several processes may write it at once.
Layers are stored one by one, so nothing in the file depends on how a provider groups them. Not guaranteed: anything
against a process of the same user, or against root.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import mmap
import os
import secrets
import stat
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from wire.errors import ConfigurationError
from wire.ring.quantise import QUANTISER_VERSION, digest, quantise, square_sums

LayerKind = Literal["linear", "conv1d"]

_LOGGER = logging.getLogger(__name__)
_MAGIC = b"veilbase-prepared-store1"
_TAIL = struct.Struct("<Q24s32s")
_ALIGNMENT = 64
_MAX_HEADER_BYTES = 1 << 28
_SUFFIX = ".prepared"
_PARTIAL = ".partial-"
_PARTIAL_AGE_S = 86_400
"""A partial file of this age is what a crash left: no checkpoint takes a day to prepare."""
_UNUSED_S = 30 * 86_400
"""A store that was not opened for so long is removed when another one is written."""
_CHECKED_BYTES = 1 << 24
"""The bytes of a store that are checked before it is said how far this is."""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True, eq=False)
class PreparedLayer:
    """Holds one layer's int8 weight and what a comparison needs of it.

    Attributes:
        kind: how the checkpoint stores the weight: `linear` as (out, in), `conv1d` as (in, out).
        weight: W̃, int8, shape (in_features, out_features), contiguous, CPU.
        alpha: α, float32, shape (out_features,).
        digest: the result of `wire.ring.quantise.digest`.
        row_squares, column_squares: the results of `wire.ring.quantise.square_sums`.
    """

    kind: LayerKind
    weight: torch.Tensor = field(repr=False)
    alpha: torch.Tensor = field(repr=False)
    digest: str
    row_squares: torch.Tensor = field(repr=False)
    column_squares: torch.Tensor = field(repr=False)


def prepare_layer(weight: torch.Tensor, kind: LayerKind) -> PreparedLayer:
    """Quantises a layer's weight, shape (in_features, out_features).

    Raises:
        InvalidTensor: the weight is not a matrix, or has a value that is not finite.
    """
    quantised, alpha = quantise(weight)
    columns, rows = square_sums(quantised)
    return PreparedLayer(kind, quantised, alpha, digest(quantised, alpha), rows, columns)


@dataclass(frozen=True)
class StoreKey:
    """States what a store was made of.

    Attributes:
        source: the SHA-256, in hex, of each of the checkpoint's files, by name.
        versions: the versions of the code that read the checkpoint, by name.
    """

    source: Mapping[str, str]
    versions: Mapping[str, str]

    @property
    def file_name(self) -> str:
        """Returns the store's file name, which depends on the whole key: Python environments with other versions have
        their own stores in the same folder, and none replaces another's."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest() + _SUFFIX

    def to_json(self) -> dict[str, Any]:
        """Returns the key as the header states it, with the quantiser's version."""
        return {
            "source": dict(self.source),
            "versions": {**self.versions, "quantiser": str(QUANTISER_VERSION)},
        }


class PreparedStore:
    """Reads a store whose bytes were checked. Tensors are views of the mapped file."""

    def __init__(self, mapped: mmap.mmap, header: dict[str, Any]) -> None:
        """Takes the mapped file and its header; `open_store` makes these."""
        self._mapped = mapped
        self._layers, self._blobs = header["layers"], header["blobs"]
        self.facts: dict[str, Any] = header["facts"]

    @property
    def layer_names(self) -> frozenset[str]:
        return frozenset(self._layers)

    def layer(self, name: str) -> PreparedLayer:
        """Returns a layer; raises KeyError if the store has none of this name."""
        entry = self._layers[name]
        inputs, outputs = entry["shape"]
        return PreparedLayer(
            entry["kind"],
            self._array(entry["weight"], torch.int8, inputs * outputs).view(inputs, outputs),
            self._array(entry["alpha"], torch.float32, outputs),
            entry["digest"],
            self._array(entry["row_squares"], torch.float64, inputs),
            self._array(entry["column_squares"], torch.float64, outputs),
        )

    def blobs(self) -> dict[str, bytes]:
        return {name: self._mapped[start : start + size] for name, (start, size) in self._blobs.items()}

    def _array(self, offset: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        return torch.frombuffer(self._mapped, dtype=dtype, count=count, offset=offset)


def open_store(
    folder: Path, key: StoreKey, checked: Callable[[int, int], object] = lambda done, total: None
) -> PreparedStore | None:
    """Opens a store and checks it; returns None if there is none.

    Args:
        folder: the folder of the stores.
        key: what the store must have been made of.
        checked: called with the number of bytes whose SHA-256 was worked out, and that of all bytes.

    Raises:
        ConfigurationError: the store is not to be trusted; the text says why.
    """
    try:
        fd = _open_file(folder, key.file_name)
        if os.fstat(fd).st_nlink == 0:  # Another process has put a new store in its place since.
            os.close(fd)
            fd = _open_file(folder, key.file_name)
    except FileNotFoundError:
        return None
    except OSError as exc:
        is_link = exc.errno in (errno.ELOOP, errno.ENOTDIR)
        why = "it is a link or no folder" if is_link else exc.strerror or "it cannot be opened"
        raise ConfigurationError(why) from exc
    try:
        status = os.fstat(fd)
        _check_owner(status, "it")
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            raise ConfigurationError("it is no file of its own")
        if status.st_size <= _TAIL.size:
            raise ConfigurationError("it is cut short")
        # The mapping is private, and no page of it is ever written: torch only asks for a writable buffer.
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        mapped = mmap.mmap(fd, status.st_size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with contextlib.suppress(OSError):
            os.utime(fd)  # It was used: see `_UNUSED_S`.
    except (OSError, ValueError) as exc:
        raise ConfigurationError(getattr(exc, "strerror", None) or "it cannot be mapped") from exc
    finally:
        os.close(fd)
    return PreparedStore(mapped, _checked_header(mapped, key, checked))


def _open_file(folder: Path, name: str) -> int:
    """Opens a file of the folder for reading. Links are not followed, and a planted pipe does not block."""
    parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_owner(os.fstat(parent), "its folder")
        return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    finally:
        os.close(parent)


def _check_owner(status: os.stat_result, what: str) -> None:
    if status.st_uid != os.geteuid():
        raise ConfigurationError(f"{what} belongs to another user")
    if status.st_mode & _OTHERS:  # the group's bits show the rights of access control lists, too
        raise ConfigurationError(f"others may open or change {what}")


def _checked_header(mapped: mmap.mmap, key: StoreKey, checked: Callable[[int, int], object]) -> dict[str, Any]:
    """Returns the header of a mapped store. Nothing but the fixed tail is read before the SHA-256 was checked."""
    size = len(mapped)
    header_bytes, magic, sha = _TAIL.unpack(mapped[size - _TAIL.size :])
    digest = hashlib.sha256()
    with memoryview(mapped) as whole, whole[: size - len(sha)] as summed:
        for start in range(0, len(summed), _CHECKED_BYTES):
            with summed[start : start + _CHECKED_BYTES] as part:
                digest.update(part)
                checked(start + len(part), len(summed))
    found = digest.digest()
    if magic != _MAGIC or found != sha:
        raise ConfigurationError("its bytes are damaged")
    if header_bytes > min(_MAX_HEADER_BYTES, size - _TAIL.size):
        raise ConfigurationError("its header is too large")
    try:
        header = json.loads(mapped[size - _TAIL.size - header_bytes : size - _TAIL.size])
        _check_header(header, size)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise ConfigurationError("its header cannot be read") from exc
    if header["key"] != key.to_json():
        raise ConfigurationError("it was made of another checkpoint or by other releases")
    return dict(header)


def _check_header(header: Any, size: int) -> None:
    """Checks that all arrays lie within the file; raises one of the errors that `_checked_header` catches."""
    spans = [(start, length) for start, length in header["blobs"].values()]
    for entry in header["layers"].values():
        inputs, outputs = entry["shape"]
        if (
            entry["kind"] not in ("linear", "conv1d")
            or min(inputs, outputs) < 1
            or not isinstance(entry["digest"], str)
        ):
            raise ValueError("a layer that cannot be")
        spans += [(entry[name], num_bytes) for name, num_bytes in _layer_bytes(inputs, outputs).items()]
    outside = any(min(start, length) < 0 or start + length > size for start, length in spans)
    if outside or not isinstance(header["facts"], dict):
        raise ValueError("an array outside the file")


def _layer_bytes(inputs: int, outputs: int) -> dict[str, int]:
    return {
        "weight": inputs * outputs, "alpha": 4 * outputs, "row_squares": 8 * inputs, "column_squares": 8 * outputs,
    }  # fmt: skip


class StoreWriter:
    """Writes a store; `writing` makes one."""

    def __init__(self, file: Any) -> None:
        """Takes the file, open for writing."""
        self._file, self._sha, self._size = file, hashlib.sha256(), 0
        self._layers: dict[str, Any] = {}
        self._blobs: dict[str, tuple[int, int]] = {}
        self.facts: dict[str, Any] = {}

    def add_layer(self, name: str, layer: PreparedLayer) -> None:
        """Adds a layer."""
        entry: dict[str, Any] = {"kind": layer.kind, "shape": list(layer.weight.shape), "digest": layer.digest}
        for part in ("weight", "alpha", "row_squares", "column_squares"):
            tensor: torch.Tensor = getattr(layer, part)
            entry[part] = self._aligned(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        self._layers[name] = entry

    def add_blob(self, name: str, content: bytes) -> None:
        self._blobs[name] = self._aligned(content), len(content)

    def _aligned(self, content: bytes | memoryview) -> int:
        self._write(bytes(-self._size % _ALIGNMENT))
        start = self._size
        self._write(content)
        return start

    def _write(self, content: bytes | memoryview) -> None:
        self._file.write(content)
        self._sha.update(content)
        self._size += len(content)

    def finish(self, key: StoreKey) -> None:
        """Writes the header and the tail."""
        fields = {"key": key.to_json(), "layers": self._layers, "blobs": self._blobs, "facts": self.facts}
        header = json.dumps(fields, sort_keys=True).encode()
        self._write(header)
        self._write(_TAIL.pack(len(header), _MAGIC, b"")[: _TAIL.size - self._sha.digest_size])
        self._file.write(self._sha.digest())


@contextlib.contextmanager
def writing(folder: Path, key: StoreKey) -> Iterator[StoreWriter]:
    """Writes a store under a temporary name, and gives it its own name if the block ends without an error. Whatever has
    this name already is replaced.

    Args:
        folder: the folder of the stores, which is made if needed. If others could open it, its rights are mended and
            the stores in it are removed. Stores that were
            not opened for 30 days are removed too.
        key: what the store is made of.

    Raises:
        OSError: the disk is full or cannot be written, or the folder belongs to another user.
    """
    parent = _own_folder(folder)
    name = _PARTIAL + secrets.token_hex(8)
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
        try:
            with os.fdopen(fd, "wb") as file:
                os.fchmod(fd, 0o600)  # a umask may have taken the owner's own rights
                writer = StoreWriter(file)
                yield writer
                writer.finish(key)
                file.flush()
                os.fsync(fd)
            os.replace(name, key.file_name, src_dir_fd=parent, dst_dir_fd=parent)
            os.fsync(parent)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=parent)
            raise
    finally:
        os.close(parent)


def _own_folder(folder: Path) -> int:
    """Opens the folder of the stores, which is made with mode 0700 if needed. Removes what crashes left, and, if others
    could open the folder, all stores in it."""
    for each in (*reversed(folder.parents), folder):
        if each == folder and each.is_symlink():
            each.unlink()
        if not each.is_dir():
            each.mkdir(mode=0o700, exist_ok=True)
    parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(parent)
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "its folder belongs to another user")
        was_open = bool(status.st_mode & _OTHERS)
        os.fchmod(parent, 0o700)
        for name in os.listdir(parent):
            most_s = _PARTIAL_AGE_S if name.startswith(_PARTIAL) else _UNUSED_S if name.endswith(_SUFFIX) else None
            if most_s is not None and (was_open or _age_s(name, parent) > most_s):
                _LOGGER.info("removes %s from %s: %s", name, folder, "others could change it" if was_open else "unused")
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=parent)
    except BaseException:
        os.close(parent)
        raise
    return parent


def _age_s(name: str, parent: int) -> float:
    try:
        return time.time() - os.stat(name, dir_fd=parent, follow_symlinks=False).st_mtime
    except FileNotFoundError:  # another process has finished it meanwhile
        return 0.0
