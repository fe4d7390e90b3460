"""Takes every file descriptor that this process may have."""

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
    """Leaves no descriptor in this process; yields those that were taken, the last of which may be given back."""
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
