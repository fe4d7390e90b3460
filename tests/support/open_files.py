"""Uses up all file descriptors of this process."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

import pytest


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
