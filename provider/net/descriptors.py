"""Open files of a provider's process: how many there may be, what the ports may take of them, and one kept in reserve.

Guarantees: strangers who only connect take no more than the ports' shares, so that what is left suffices for the
registry, the accounts and the log; the spare descriptor is nobody else's while nobody borrows it.
Does not: count descriptors. Shares are worked out once, from the limit that holds when the ports are bound.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

MOST_FILES = 1 << 16
"""The soft limit is raised to so many at most: more would serve nobody, and some systems' hard limit is a billion."""
RESERVED_FILES = 128
"""Neither port takes these: a provider that idles has 16 open, and bundles, pipes to shards and accounts need a few."""
MOST_RPC_CONNECTIONS = 4096
"""At the gRPC port, those that are still shaking hands included. A silent one takes 20 KB, one that has said hello and
no more up to 50 (the growth of the process over a thousand of either), so all of them take 200 MB at most."""
MOST_STREAMS = 256
"""At the tensor port. Each holds a thread as well."""
FILES_PER_STREAM = 2
"""Its socket, and what wakes the thread that waits for it."""
_FEW_CONNECTIONS = 1024
"""Fewer are worth a line in the log: a flood is then soon ahead of tenants."""
_STREAMS_PART = 0.6
"""Of the free descriptors that streams may take; at the usual soft limit of 1,024 that is just above all of them."""
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shares:
    """The most connections that each port holds open."""

    rpc_connections: int
    streams: int


def shares(num_files: int, has_tensor_port: bool) -> Shares:
    """How the ports share so many descriptors.

    Args:
        num_files: the soft limit.
        has_tensor_port: False leaves its share to gRPC.
    """
    free = max(num_files - RESERVED_FILES, num_files // 2)  # a limit as low as this is served as well as it can be
    streams = 0
    if has_tensor_port:
        streams = max(1, min(MOST_STREAMS, int(_STREAMS_PART * free) // FILES_PER_STREAM))
    return Shares(max(1, min(MOST_RPC_CONNECTIONS, free - FILES_PER_STREAM * streams)), streams)


def file_limit() -> int:
    """The soft limit of open files of this process."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> None:
    """Raises the soft limit of open files towards the hard one; a line in the log where that leaves it low.

    For a process that is a provider's own: a library must not do this to a program that uses it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # some systems allow less than they say
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    limit = file_limit()
    here = shares(limit, has_tensor_port=True)
    if here.rpc_connections < _FEW_CONNECTIONS:
        wanted = RESERVED_FILES + FILES_PER_STREAM * MOST_STREAMS + MOST_RPC_CONNECTIONS
        _LOGGER.warning(
            "at most %d files can be open here, which leaves room for %d connections and %d streams: "
            "raise the hard limit (ulimit -Hn) to %d or more for all %d and %d",
            limit, here.rpc_connections, here.streams, wanted, MOST_RPC_CONNECTIONS, MOST_STREAMS,
        )  # fmt: skip


class SpareDescriptor:
    """A descriptor that is kept open, so that a file can be opened when no other is left; safe under threads."""

    def __init__(self) -> None:
        """Takes one, if there is one."""
        self._lock = threading.Lock()
        self._fd: int | None = None
        self.take_back()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Lets it go for the length of the block, which may then open one file.

        Another thread can be faster. Then the block's own attempt fails as it would have without this, and the spare
        is taken back when one is free again.
        """
        with self._lock:
            self._let_go()
            try:
                yield
            finally:
                self._take()

    def take_back(self) -> None:
        """Takes one again after another thread was faster; does nothing where it is here."""
        if self._fd is None:
            with self._lock:
                self._take()

    def _take(self) -> None:
        if self._fd is None:
            with suppress(OSError):
                self._fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _let_go(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def close(self) -> None:
        """Gives it back for good."""
        with self._lock:
            self._let_go()

    def __del__(self) -> None:
        """Servers come and go in one process, as in tests."""
        self._let_go()
