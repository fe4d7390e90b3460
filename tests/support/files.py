"""Reads the permissions of files and sets those of new ones, damages a file, and uses up all file descriptors."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest


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


def flip(path: Path, offset: int | None = None) -> None:
    """Changes one bit of a file, in the byte at `offset` or, without `offset`, in the middle byte."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if offset is None else offset] ^= 1
    path.write_bytes(content)


def _take_all(taken: list[int]) -> None:
    while True:
        taken.append(os.dup(taken[0]))


@contextlib.contextmanager
def exhausted() -> Iterator[list[int]]:
    """Uses up all file descriptors inside the context. Yields the descriptors that were opened; a test may close the
    last one."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 32, limits[1]))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        with pytest.raises(OSError) as caught:
            _take_all(taken)
        assert caught.value.errno == errno.EMFILE
        yield taken
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
