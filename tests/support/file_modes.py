"""Reads the permissions of a file, and sets the umask with which files are made."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path


def mode(path: Path) -> int:
    """Returns the permission bits of a file or folder."""
    return stat.S_IMODE(path.stat().st_mode)


@contextlib.contextmanager
def umask_of(number: int) -> Iterator[None]:
    """Sets the umask of the whole process inside the context, as a user's shell could have set it."""
    before = os.umask(number)
    try:
        yield
    finally:
        os.umask(before)
