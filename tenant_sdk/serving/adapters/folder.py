"""This module implements the disk tier of the adapter store, which opens PEFT adapters in a folder, each in its own
subfolder, without trusting their files.

`Known` remembers the digest of each adapter, or the reason why the adapter cannot be used, so that unchanged files are
not read again. `opened_by_user` opens an adapter that the user of this process names, and follows links.

Guarantees: of an adapter, only `adapter_config.json` and `adapter_model.safetensors` are opened, and only if they are
regular files. In an `AdapterFolder`, no name, no `..` and no symbolic link in the folder leads to a file outside it.
Not guaranteed: a hard link to a file outside the folder is opened, since a hard link looks like any other file. Links
in the path of the folder itself are followed, since the operator made them.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from tenant_sdk.serving.adapters.files import Found, Reading, Stamp, is_settled, stamp_of
from tenant_sdk.serving.adapters.targets import Base
from wire.errors import ConfigurationError, VeilbaseError

MOST_NAMES = 4096
"""The most adapters that are remembered. The files of any other adapter are read again."""


class Known:
    """Remembers adapters' digests and failures by name. Each entry is valid while the files have the same stamp
    (sizes and times, see files.py)."""

    def __init__(self) -> None:
        """Makes an empty memory of digests and failures."""
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[Stamp, str | None, str]] = OrderedDict()

    def digest(self, name: str, stamp: Stamp | None) -> str | None:
        """Returns an adapter's digest if it is known for the present stamp of the files; otherwise returns None.

        Raises:
            ConfigurationError: the files were read before with this stamp, and cannot be used.
        """
        with self._lock:
            found = self._known.get(name)
            if found is None or stamp is None or found[0] != stamp:
                return None
            self._known.move_to_end(name)
        if found[1] is None:
            raise ConfigurationError(found[2])
        return found[1]

    def last_digest(self, name: str) -> str | None:
        """Returns the digest that an adapter had when its files were last read; None if it is not known."""
        with self._lock:
            found = self._known.get(name)
            return None if found is None else found[1]

    def keep_digest(self, found: Found, digest: str) -> None:
        """Remembers the digest of an adapter that can be used."""
        self._remember(found.name, found.stamp if found.settled else None, digest, "")

    def keep_failure(self, name: str, stamp: Stamp | None, failure: VeilbaseError) -> None:
        """Remembers why an adapter cannot be used. A failure that may be temporary is not remembered."""
        if isinstance(failure, ConfigurationError):
            self._remember(name, stamp, None, str(failure))

    def _remember(self, name: str, stamp: Stamp | None, digest: str | None, reason: str) -> None:
        if stamp is None:
            return
        with self._lock:
            self._known[name] = (stamp, digest, reason)
            self._known.move_to_end(name)
            if len(self._known) > MOST_NAMES:
                self._known.popitem(last=False)


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")


class AdapterFolder:
    """Finds and opens the adapters of a folder, each of which has its own subfolder."""

    def __init__(self, root: Path, base: Base, max_file_bytes: int) -> None:
        """Checks the names in the folder, without opening its adapters.

        Args:
            root: the folder.
            base: the model that adapters have to fit.
            max_file_bytes: the largest weights file that is read.

        Raises:
            ConfigurationError: there is no such folder, or two of its adapters have names that differ only in case.
        """
        self._root = root
        self._base = base
        self._max_file_bytes = max_file_bytes
        _refuse_twins(self.names())

    def names(self) -> list[str]:
        """Returns the names of the adapters that are in the folder now, whether or not they can be used.

        Raises:
            ConfigurationError: the folder cannot be read.
        """
        try:
            with os.scandir(self._root) as entries:
                folders = [each.name for each in entries if each.is_dir(follow_symlinks=False)]
        except OSError as exc:
            raise ConfigurationError(f"the folder of adapters cannot be read: {exc.strerror}") from exc
        return sorted(name for name in folders if _NAME.fullmatch(name) and not self._is_of_a_run(name))

    def _is_of_a_run(self, name: str) -> bool:
        """Returns whether a subfolder holds checkpoints or reports of a fine-tuning run, and no adapter."""
        return name.endswith((".checkpoints", ".logs")) and not (self._root / name / CONFIG).exists()

    def find(self, name: str, subfolder: str | None = None) -> Found:
        """Checks an adapter's settings and header, and returns the adapter's description. Args, Raises: see
        `reading`."""
        with self.reading(name, subfolder) as reading:
            return reading.found

    @contextlib.contextmanager
    def reading(self, name: str, subfolder: str | None = None) -> Iterator[Reading]:
        """Opens an adapter and checks its settings and header. Inside the context, its weights can be read.

        Args:
            name: the adapter's name, for error messages.
            subfolder: the adapter's subfolder; None means the subfolder called `name`.

        Raises:
            ConfigurationError: there is no such adapter, or the adapter cannot be used.
        """
        with self._open(name, subfolder or name) as (config, weights):
            yield Reading(name, config, weights, self._base, self._max_file_bytes)

    def stamp(self, name: str, subfolder: str | None = None) -> Stamp | None:
        """Returns an adapter's stamp, which changes if the adapter's files change; None if the files changed just now.

        Args, Raises: see `reading`; the contents of the files are not checked.
        """
        with self._open(name, subfolder or name) as files:
            found = stamp_of(*files)
        return found if is_settled(found) else None

    def has(self, name: str) -> bool:
        """Returns whether the folder has an adapter of this name now, usable or not; only this adapter is looked for,
        however many there are."""
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            return False
        try:
            is_folder = stat.S_ISDIR(os.stat(self._root / name, follow_symlinks=False).st_mode)
            return is_folder and not self._is_of_a_run(name)
        except OSError:
            return False

    @contextlib.contextmanager
    def _open(self, name: str, subfolder: str) -> Iterator[tuple[int, int]]:
        """Opens both files of an adapter, each relative to its parent folder and without following links."""
        if not isinstance(subfolder, str) or _NAME.fullmatch(subfolder) is None:
            raise ConfigurationError(
                f"{ascii(name)[:200]} cannot be an adapter's name: at most 128 letters, digits, '.', '_' and '-'"
            )
        with contextlib.ExitStack() as stack:
            root = _opened(stack, self._root, os.O_DIRECTORY, None)
            folder = None if root is None else _opened(stack, subfolder, os.O_DIRECTORY | os.O_NOFOLLOW, root)
            if folder is None:
                raise ConfigurationError(f"there is no adapter {name!a} in the folder of adapters")
            yield _files_of(name, stack, folder, os.O_NOFOLLOW)


@contextlib.contextmanager
def opened_by_user(folder: Path) -> Iterator[tuple[int, int]]:
    """Opens both files of an adapter that the user of this process names, and yields their descriptors. Links are
    followed, since the hub's cache of downloads has links in place of files.

    Raises:
        ConfigurationError: there is no such folder, or it lacks one of the files.
    """
    with contextlib.ExitStack() as stack:
        fd = _opened(stack, folder, os.O_DIRECTORY, None)
        if fd is None:
            raise ConfigurationError(f"there is no adapter folder {folder}")
        yield _files_of(str(folder), stack, fd, 0)


def _opened(stack: contextlib.ExitStack, path: str | Path, flags: int, folder: int | None) -> int | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=folder)
    except OSError:
        return None
    stack.callback(os.close, fd)
    wanted = stat.S_ISDIR if flags & os.O_DIRECTORY else stat.S_ISREG
    return fd if wanted(os.fstat(fd).st_mode) else None


def _files_of(name: str, stack: contextlib.ExitStack, folder: int, flags: int) -> tuple[int, int]:
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    config, weights = (_opened(stack, file, flags | os.O_NONBLOCK, folder) for file in (CONFIG, WEIGHTS))
    if config is None or weights is None:
        raise ConfigurationError(_what_is_missing(name, folder, config is None))
    return config, weights


def _what_is_missing(name: str, folder: int, config: bool) -> str:
    if config:
        return f"the adapter {name} has no {CONFIG} that is a regular file and can be read: is it an adapter folder?"
    if any(file in os.listdir(folder) for file in _PICKLES):
        return f"the adapter {name} keeps its weights in a pickle, which is not opened: save it as safetensors"
    return f"the adapter {name} has no {WEIGHTS} that is a regular file and can be read"


def _refuse_twins(names: list[str]) -> None:
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            raise ConfigurationError(f"the adapters {other} and {name} have one name but for case: rename one of them")
