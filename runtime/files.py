"""This module writes files that survive a crash, locks folders, and tells before work is done whether there is a place
for files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
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


def why_not_writable(folder: Path) -> str:
    """Returns why nothing can be made in a folder that is there, in words; an empty text if something can.

    It makes an empty folder and removes it, since permissions say nothing of a file system that takes no new files,
    such as /proc or one that is mounted to be read only, and nothing at all to the superuser.
    """
    if not os.access(folder, os.W_OK | os.X_OK):
        return "permission denied"
    try:
        os.rmdir(tempfile.mkdtemp(dir=folder, prefix=".veilbase-"))
    except OSError as exc:
        return f"nothing can be made in {str(folder)!a} ({exc.strerror or type(exc).__name__})"
    return ""


def nearest_there(path: Path) -> Path:
    """Returns the first of a path and the folders around it that is there, which may be a link to nothing."""
    return next(each for each in (path, *path.absolute().parents) if os.path.lexists(each))
