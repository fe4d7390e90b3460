"""This module writes files that survive a crash, and locks folders."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def create_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Writes a new file to disk, and leaves none behind if this fails; raises FileExistsError if the path exists, even
    if the path is a dangling link."""
    # The file is created with its final mode, so it is never readable by more users, whatever the umask is.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def sync_directory(path: Path) -> None:
    """Syncs a directory's entries to disk, so that new and renamed files in the directory survive a crash."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked_folder(path: Path) -> Iterator[None]:
    """Holds a folder's lock while the block runs, which only one process or thread at a time can do. The folder must
    exist."""
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)  # the lock is released when the descriptor is closed
        yield
    finally:
        os.close(held)
