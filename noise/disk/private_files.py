"""This module makes folders and files that only their owner can read, whatever the umask, makes the names of new files
survive a crash, tells whether a folder is in memory, and locks a file on a local file system, so that processes exclude
each other.

Guarantees:
- a folder is made with mode 0700, so no other user can enter it at any moment. `make_private_folder` changes no folder
  that existed before. The umask is not changed, since it belongs to the whole process, in which other threads make
  files meanwhile;
- at any time only one thread of one process holds a lock, even if the file is deleted meanwhile. The lock is released
  when its holder dies. A child that is forked while the lock is held does not hold the lock.

Not guaranteed: root can still enter a private folder, and so can users who may rename an existing parent folder. On
network file systems nothing is guaranteed about locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Writes the names in a folder to the disk, so that they survive a crash. A file's own fsync does not cover its
    name."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(lock: Path, wait: bool = True) -> Iterator[bool]:
    """Holds the lock while the block runs; raises OSError if the file cannot be opened.

    The file is opened anew each time, so the lock also works between threads of one process.

    Args:
        lock: the file, which is created if it is missing.
        wait: whether to wait for the lock. If this is False and another thread or process holds the lock, the block
            runs without it.

    Yields:
        Whether the block holds the lock.
    """
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            is_held = _lock(fd, wait)
            # If the file was removed meanwhile, others lock the new file of this name, so this tries again.
            if not is_held or _is_at(fd, lock):
                yield is_held
                return
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # Closing does not unlock while a forked child holds the same file.
            os.close(fd)


def _lock(fd: int, wait: bool) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


def is_in_memory(folder: Path) -> bool:
    """Returns whether the file system of a folder that is or will be keeps files in memory (tmpfs). False where the
    system does not tell."""
    path = folder.absolute().resolve()
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
            mounts = [line.split()[1:3] for line in file]
    except OSError:
        return False
    depth, found = -1, ""
    for place, kind in mounts:
        mounted = Path(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), place))  # \040 is a space
        # Of two file systems at one place the later one hides the other.
        if path.is_relative_to(mounted) and len(mounted.parts) >= depth:
            depth, found = len(mounted.parts), kind
    return found in _IN_MEMORY


FOLDER_MODE = 0o700
FILE_MODE = 0o600


def free_bytes(folder: Path) -> int:
    """Returns the free bytes of the disk on which a folder is or will be."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    return shutil.disk_usage(there).free


def make_private_folder(folder: Path) -> None:
    """Makes a folder and its missing parents with mode 0700. Folders that exist stay as they are.

    Raises:
        OSError: the folder cannot be made, or a file has its name.
    """
    for each in (*reversed(folder.parents), folder):
        if each.is_dir():
            continue
        try:
            each.mkdir(mode=FOLDER_MODE)
        except FileExistsError:
            if not each.is_dir():  # Another process may have made it meanwhile.
                raise
        else:
            each.chmod(FOLDER_MODE)  # A umask may have taken the owner's own rights.


def write_private(path: Path, text: str) -> None:
    """Writes a text file with mode 0600, even if the file exists with another mode.

    Raises:
        OSError: the file cannot be written.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        os.fchmod(fd, FILE_MODE)  # The mode is set before there is anything to read.
        os.ftruncate(fd, 0)
        file.write(text)


def make_private(folder: Path) -> None:
    """Sets the modes of a folder that other code has filled: 0700 for folders and 0600 for files in it. Links stay as
    they are.

    Raises:
        OSError: a mode cannot be set, for example because a file or folder belongs to another user.
    """
    folder.chmod(FOLDER_MODE)
    for path in folder.rglob("*"):
        if not path.is_symlink():
            path.chmod(FOLDER_MODE if path.is_dir() else FILE_MODE)


def take_over_rights(old: Path, new: Path) -> None:
    """Gives a private folder the rights of the folder that it will replace, and each of its files the rights of the old
    file of the same name.

    Rights are owner, group, mode and access control lists. A mode without its group or list would let others in, so a
    new folder or file stays private if its owner or group cannot be changed.

    Args:
        old: a folder, or a link to one.
        new: a folder that `make_private` has prepared.
    """
    _take_over(old, new)
    for path in new.iterdir():
        before = old / path.name
        if path.is_file() and before.is_file() and not before.is_symlink():
            _take_over(before, path)


def _take_over(old: Path, new: Path) -> None:
    had, has = old.stat(), new.stat()
    if (had.st_uid, had.st_gid) != (has.st_uid, has.st_gid):
        try:
            os.chown(new, had.st_uid, had.st_gid)
        except OSError:
            return
    shutil.copystat(old, new)  # This copies the mode and the extended attributes, which hold access control lists.
    new.chmod(stat.S_IMODE(had.st_mode) | (stat.S_IRWXU if new.is_dir() else stat.S_IRUSR | stat.S_IWUSR))
    os.utime(new)
