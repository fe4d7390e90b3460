"""Divides the file descriptors of a provider's process among its ports, and keeps a spare one.

Guarantees: peers that only connect take no more descriptors than the ports' shares, so that enough are left for the
registry, the usage file and the log. The shares are computed once, from the limit at the time when the ports are bound.
Descriptors are not counted afterwards.
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
"""The most open files to which the provider raises its soft limit. The provider cannot use more, and on some systems
the hard limit is a billion."""
RESERVED_FILES = 128
"""Descriptors that the ports may not use. An idle provider uses 16; bundles, pipes to shards and the usage file need
a few more."""
MOST_RPC_CONNECTIONS = 4096
"""The most connections at the gRPC port, including connections whose handshake is not finished. A silent connection
takes 20 KB of memory and one that has sent only HELLO up to 50 KB, measured with a thousand connections. So all of them
together take at most 200 MB."""
MOST_STREAMS = 256
"""The most connections at the tensor port, and at the socket in a folder. Each of them also occupies a thread."""
FILES_PER_STREAM = 2
"""Descriptors that a stream at the tensor port uses: one for its socket, and one to wake its waiting thread."""
_FEW_CONNECTIONS = 1024
"""A warning is logged if gRPC may have fewer connections than this, since a flood of connections then soon keeps
tenants out."""
_STREAMS_PART = 0.6
"""The share of the free descriptors that streams may take. At the usual soft limit of 1,024, this is just enough for
`MOST_STREAMS`."""
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shares:
    """Holds the most connections that each port may have open: `rpc_connections` at the gRPC port, and `streams` at
    each port that takes streams."""

    rpc_connections: int
    streams: int


def shares(num_files: int, num_stream_ports: int) -> Shares:
    """Divides the process's descriptors among the ports.

    Args:
        num_files: the soft limit of open files.
        num_stream_ports: how many ports take streams, each of which gets an equal part, so that a flood at one of them
            does not close the other; if there is none, gRPC gets their share.
    """
    # If the limit is too low to keep the reserve, half of the descriptors are divided.
    free = max(num_files - RESERVED_FILES, num_files // 2)
    streams = 0
    if num_stream_ports:
        streams = max(1, min(MOST_STREAMS, int(_STREAMS_PART * free) // FILES_PER_STREAM // num_stream_ports))
    taken = FILES_PER_STREAM * streams * num_stream_ports
    return Shares(max(1, min(MOST_RPC_CONNECTIONS, free - taken)), streams)


def file_limit() -> int:
    """Returns the soft limit of open files of this process; `MOST_FILES` if there is no limit."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> None:
    """Raises the soft limit of open files to the hard limit or `MOST_FILES`; warns in the log if the result is too low.

    Only the provider's own command may call this, since a library must not change the limits of the program that uses
    it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # Some systems allow less than the hard limit.
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    limit = file_limit()
    here = shares(limit, num_stream_ports=1)
    if here.rpc_connections < _FEW_CONNECTIONS:
        wanted = RESERVED_FILES + FILES_PER_STREAM * MOST_STREAMS + MOST_RPC_CONNECTIONS
        _LOGGER.warning(
            "at most %d files can be open here, which leaves room for %d connections and %d streams: "
            "raise the hard limit (ulimit -Hn) to %d or more for all %d and %d",
            limit, here.rpc_connections, here.streams, wanted, MOST_RPC_CONNECTIONS, MOST_STREAMS,
        )  # fmt: skip


class SpareDescriptor:
    """Keeps a spare descriptor, so that one file can be opened even if no other is free. It is safe under threads.

    While the spare is open, nothing else can use this descriptor; `lent` closes it for one file.
    """

    def __init__(self) -> None:
        """Opens the spare descriptor, unless no descriptor is free."""
        self._lock = threading.Lock()
        self._fd: int | None = None
        self.take_back()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Closes the spare descriptor during a `with` block, so that the block can open one file.

        If another thread uses the free descriptor first, the block cannot open its file. The spare is opened again when
        the block ends; if that fails, `take_back` can open it later.
        """
        with self._lock:
            self._let_go()
            try:
                yield
            finally:
                self._take()

    def take_back(self) -> None:
        """Opens the spare descriptor again if it is closed, unless no descriptor is free."""
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
        """Closes the spare descriptor, so that it is free for other files."""
        with self._lock:
            self._let_go()

    def __del__(self) -> None:
        """Closes the spare descriptor, which would otherwise leak if a process starts and stops several servers."""
        self._let_go()
