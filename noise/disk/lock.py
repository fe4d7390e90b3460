"""This module locks a file on a local file system, so that processes exclude each other. The lock is released when its
holder dies.

Guarantees: at any time only one thread of one process holds the lock, even if the file is deleted meanwhile. A child
that is forked while the lock is held does not hold the lock. Nothing is guaranteed on network file systems.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


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
