"""Opens plain sockets to a provider's ports, as clients that send nothing do."""

from __future__ import annotations

import contextlib
import socket

from tests.support.waiting import WAIT_S


def dial(port: int) -> socket.socket:
    """Returns a connection to a port of this machine."""
    return socket.create_connection(("127.0.0.1", port), WAIT_S)


def assert_ends(plain: socket.socket) -> None:
    """Waits until the other side ends a connection, and ignores what it sends before."""
    plain.settimeout(WAIT_S)
    with contextlib.suppress(ConnectionError):
        while plain.recv(1 << 16):
            pass
    plain.close()
