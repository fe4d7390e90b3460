"""The disk tier: a folder of PEFT adapters, one subfolder each, read without trusting what lies in it.

Guarantees: only `adapter_config.json` and `adapter_model.safetensors` are opened, as regular files, and neither a name,
`..` nor a link leads out of the folder; what is checked, hashed and used are the same bytes, read once; a file that is
written while it is read is refused. Not guaranteed: a hard link is the file itself, wherever else it may be named, and
links in the path of the folder itself are its operator's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from tenant_sdk.serving.adapters.peft_config import MAX_CONFIG_BYTES, parse_settings
from tenant_sdk.serving.adapters.targets import Base
from tenant_sdk.serving.adapters.weights_file import LoraLayer, header_bytes, parse_layers
from wire.errors import ConfigurationError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
RACY_NS = 100_000_000
"""A file that changed in the last 0.1 s may change again without a new time: file systems count in ticks of 1 to 10 ms.
Its stamp is not relied on."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PIECE_BYTES = 1 << 18
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")

Stamp = tuple[tuple[int, int, int, int, int], ...]
"""Device, inode, size, mtime and ctime of both files: what changes when an adapter does."""


@dataclass(frozen=True)
class Found:
    """An adapter whose settings and header were checked, and whose weights were not read yet.

    Attributes:
        name: its name.
        stamp: what tells this version from others without reading it.
        settled: whether the stamp can be relied on; see `RACY_NS`.
        layers: where its tensors lie.
    """

    name: str
    stamp: Stamp
    settled: bool
    layers: tuple[LoraLayer, ...]

    @property
    def rank(self) -> int:
        """The largest rank of a layer."""
        return max(layer.rank for layer in self.layers)

    @property
    def num_weights(self) -> int:
        """The numbers in all factors."""
        return sum(layer.rank * (layer.lora_a.shape[1] + layer.lora_b.shape[0]) for layer in self.layers)


@dataclass(frozen=True)
class Contents:
    """An adapter that was read whole.

    Attributes:
        found: what was checked, of these very bytes.
        digest: SHA-256 of both files, one after the other, in hex: `cat CONFIG WEIGHTS | sha256sum`. A byte moved from
            one to the other would leave a safetensors file that cannot be read.
        file: the weights file's bytes, uint8.
    """

    found: Found
    digest: str
    file: torch.Tensor = field(repr=False)


class AdapterFolder:
    """A folder whose subfolders are adapters."""

    def __init__(self, root: Path, base: Base, max_file_bytes: int) -> None:
        """Takes a folder.

        Args:
            root: the folder.
            base: the model that adapters have to fit.
            max_file_bytes: the largest weights file that is read.

        Raises:
            ConfigurationError: there is no such folder, or two adapters in it have names that differ in case only.
        """
        self._root = root
        self._base = base
        self._max_file_bytes = max_file_bytes
        _refuse_twins(self.names())

    def names(self) -> list[str]:
        """Returns the names of the adapters that lie here now, whether or not they can be used.

        Raises:
            ConfigurationError: the folder cannot be read.
        """
        try:
            with os.scandir(self._root) as entries:
                folders = [each.name for each in entries if each.is_dir(follow_symlinks=False)]
        except OSError as exc:
            raise ConfigurationError(f"the folder of adapters cannot be read: {exc.strerror}") from exc
        return sorted(name for name in folders if _NAME.fullmatch(name))

    def find(self, name: str, subfolder: str | None = None) -> Found:
        """Checks an adapter's settings and header.

        Args:
            name: the adapter's name.
            subfolder: where it lies in the folder, if that is not its name.

        Raises:
            ConfigurationError: there is no such adapter, or it cannot be used.
        """
        with self._open(name, subfolder or name) as (config, weights):
            before = _stamp(config, weights)
            settings = _read_config(name, config)
            start = os.pread(weights, 8, 0)
            size = self._file_bytes(name, weights)
            header = os.pread(weights, header_bytes(name, start, size), 8)
            return self._checked(name, before, settings, header, size)

    def stamp(self, name: str, subfolder: str | None = None) -> Stamp | None:
        """Returns what tells this version of an adapter from others; None where it changed just now. Args: see `find`.

        Raises:
            ConfigurationError: there is no such adapter.
        """
        with self._open(name, subfolder or name) as (config, weights):
            found = _stamp(config, weights)
        return found if _settled(found) else None

    def read(self, name: str, subfolder: str | None = None) -> Contents:
        """Reads an adapter whole and checks everything but the numbers themselves. Args: see `find`.

        Raises:
            ConfigurationError: there is no such adapter, it cannot be used, or it changes while it is read.
        """
        with self._open(name, subfolder or name) as (config, weights):
            before = _stamp(config, weights)
            settings = _read_config(name, config)
            size = self._file_bytes(name, weights)
            start = os.pread(weights, 8, 0)
            header = os.pread(weights, header_bytes(name, start, size), 8)
            found = self._checked(name, before, settings, header, size)
            digest = hashlib.sha256(settings)
            file = _read_whole(name, weights, size, digest)
            after = _stamp(config, weights)
        if before != after or bytes(file[: 8 + len(header)].numpy()) != start + header:
            raise ConfigurationError(f"the adapter {name} is being written: try again when it is complete")
        return Contents(found, digest.hexdigest(), file)

    def _checked(self, name: str, stamp: Stamp, settings: bytes, header: bytes, size: int) -> Found:
        layers = parse_layers(name, header, size, parse_settings(name, settings, self._base), self._base)
        return Found(name, stamp, _settled(stamp), layers)

    def _file_bytes(self, name: str, weights: int) -> int:
        size = os.fstat(weights).st_size
        if size > self._max_file_bytes:
            raise ConfigurationError(
                f"the adapter {name} has {size} bytes of weights: at most {self._max_file_bytes} fit this store"
            )
        return size

    @contextlib.contextmanager
    def _open(self, name: str, subfolder: str) -> Iterator[tuple[int, int]]:
        """Opens both files of an adapter; every step stays in the folder before, and follows no link."""
        if not isinstance(subfolder, str) or _NAME.fullmatch(subfolder) is None:
            raise ConfigurationError(f"{ascii(name)[:200]} cannot be an adapter's name")
        with contextlib.ExitStack() as stack:
            root = _opened(stack, self._root, os.O_DIRECTORY, None)
            folder = _opened(stack, subfolder, os.O_DIRECTORY | os.O_NOFOLLOW, root)
            if root is None or folder is None:
                raise ConfigurationError(f"there is no adapter {name} here")
            # O_NONBLOCK: a named pipe would keep this thread waiting for a writer
            flags = os.O_NOFOLLOW | os.O_NONBLOCK
            config, weights = (_opened(stack, file, flags, folder) for file in (CONFIG, WEIGHTS))
            if config is None or weights is None:
                raise ConfigurationError(_what_is_missing(name, folder, config is None))
            yield config, weights


def _opened(stack: contextlib.ExitStack, path: str | Path, flags: int, folder: int | None) -> int | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=folder)
    except OSError:
        return None
    stack.callback(os.close, fd)
    wanted = stat.S_ISDIR if flags & os.O_DIRECTORY else stat.S_ISREG
    return fd if wanted(os.fstat(fd).st_mode) else None


def _what_is_missing(name: str, folder: int, config: bool) -> str:
    if config:
        return f"the adapter {name} has no {CONFIG} that is a regular file and can be read"
    if any(file in os.listdir(folder) for file in _PICKLES):
        return f"the adapter {name} keeps its weights in a pickle, which is not opened: save it as safetensors"
    return f"the adapter {name} has no {WEIGHTS} that is a regular file and can be read"


def _refuse_twins(names: list[str]) -> None:
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            raise ConfigurationError(f"the adapters {other} and {name} have one name but for case: rename one of them")


def _stamp(*files: int) -> Stamp:
    stats = [os.fstat(file) for file in files]
    return tuple((one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in stats)


def _settled(stamp: Stamp) -> bool:
    return all(time.time_ns() - max(each[3:]) > RACY_NS for each in stamp)


def _read_config(name: str, config: int) -> bytes:
    content = os.pread(config, MAX_CONFIG_BYTES + 1, 0)
    if len(content) > MAX_CONFIG_BYTES:
        raise ConfigurationError(f"the adapter {name} has more than {MAX_CONFIG_BYTES} bytes of settings")
    return content


def _read_whole(name: str, weights: int, size: int, digest: hashlib._Hash) -> torch.Tensor:
    """Reads a file and hashes it piece by piece, while each piece is in the cache."""
    file = np.empty(size, dtype=np.uint8)
    view, done = file.data, 0
    while done < size:
        count = os.preadv(weights, [view[done : done + _PIECE_BYTES]], done)
        if count == 0:
            raise ConfigurationError(f"the adapter {name} became shorter while it was read")
        digest.update(view[done : done + count])
        done += count
    return torch.from_numpy(file)
