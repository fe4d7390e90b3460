"""Open files of a provider's process: how many there may be, how many the ports may take, and one kept in reserve.

Guarantees: strangers who only connect take no more than the ports' shares, so that what is left suffices for the
registry, the accounts and the log; nothing else uses the spare descriptor while it is not lent. Descriptors are not
counted: shares are worked out once, from the limit that holds when the ports are bound.
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
"""Most open files to which the soft limit is raised: more would be of no use, and some systems' hard limit is a
billion."""
RESERVED_FILES = 128
"""Open files that neither port takes: an idle provider has 16, and bundles, pipes to shards and accounts need a few."""
MOST_RPC_CONNECTIONS = 4096
"""Most connections at the gRPC port, including those whose handshake is not done. A silent one takes 20 KB, one that
has sent HELLO and no more up to 50 (the growth of the process over a thousand of either), so all of them take 200 MB at
most."""
MOST_STREAMS = 256
"""Most connections at the tensor port. Each holds a thread as well."""
FILES_PER_STREAM = 2
"""Descriptors of a stream: its socket, and the one that wakes its waiting thread."""
_FEW_CONNECTIONS = 1024
"""Connections below which the log says so: a flood then soon shuts tenants out."""
_STREAMS_PART = 0.6
"""Share of the free descriptors that streams may take; at the usual soft limit of 1,024 it is just enough for all of
them."""
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shares:
    """The most connections that each port holds open."""

    rpc_connections: int
    streams: int


def shares(num_files: int, has_tensor_port: bool) -> Shares:
    """Divides so many descriptors among the ports.

    Args:
        num_files: the soft limit.
        has_tensor_port: whether there is one; if not, gRPC gets its share.
    """
    # A limit that is too low for the reserve is divided as well as it can be.
    free = max(num_files - RESERVED_FILES, num_files // 2)
    streams = 0
    if has_tensor_port:
        streams = max(1, min(MOST_STREAMS, int(_STREAMS_PART * free) // FILES_PER_STREAM))
    return Shares(max(1, min(MOST_RPC_CONNECTIONS, free - FILES_PER_STREAM * streams)), streams)


def file_limit() -> int:
    """Returns the soft limit of open files of this process."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> None:
    """Raises the soft limit of open files towards the hard one; writes a line to the log where that leaves it low.

    Only a process that is a provider's own may call this: a library must not do it to a program that uses it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # Some systems allow less than they say.
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
    """A descriptor that is kept open, so that a file can be opened when no other is left. It is safe under threads."""

    def __init__(self) -> None:
        """Takes a descriptor, if there is one."""
        self._lock = threading.Lock()
        self._fd: int | None = None
        self.take_back()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Closes the descriptor for the length of the block, which may then open one file.

        Another thread can be faster. Then the block's own attempt fails as it would have without this, and the spare is
        taken back when one is free again.
        """
        with self._lock:
            self._let_go()
            try:
                yield
            finally:
                self._take()

    def take_back(self) -> None:
        """Takes a descriptor again after another thread was faster; does nothing if it is held."""
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
        """Closes the descriptor for good."""
        with self._lock:
            self._let_go()

    def __del__(self) -> None:
        """Closes the descriptor, since servers come and go in one process, as in tests."""
        self._let_go()
