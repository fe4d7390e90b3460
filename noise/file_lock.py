"""A lock between processes that is let go when its holder dies, as a file on a local file system.

Guarantees: one holder at a time among threads and processes, also where somebody deletes the file meanwhile; a child
that is forked while it is held does not hold it. Does not guarantee anything on network file systems.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(lock: Path) -> Iterator[None]:
    """Waits for the lock and holds it; OSError where the file cannot be opened.

    The file is opened anew each time, so that threads exclude each other too.
    """
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if _is_at(fd, lock):  # else someone removed it meanwhile, and others lock its successor
                yield
                return
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing does not unlock while a forked child holds the same file
            os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
