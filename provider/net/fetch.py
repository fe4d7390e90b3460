"""Answers a tenant of this host that asks for the manifest or for a file of the bundle (wire/SPEC.md, section 3).

Guarantees: if a tenant does not read what it asked for, its connection is ended after a deadline. Only one chunk of the
file at a time waits in this process's memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from provider.net.session import HANDSHAKE_S
from wire.limits import deadline_s
from wire.transport.ipc.fetch import asked_name, data_frames
from wire.transport.message_socket import MessageSocket


def wanted_file(connection: MessageSocket) -> str | None:
    """Waits for a connection's first frame, and returns the name of the file that the frame asks for; "" stands for
    the manifest. Returns None if the connection is a stream; then the frame can still be received.

    Raises:
        MalformedFrame: the frame asks for a file that no bundle has, or is too long.
        EOFError, OSError: the connection ended, or nothing came in time.
    """
    return asked_name(connection.peek(time.monotonic() + HANDSHAKE_S))


def send_file(connection: MessageSocket, chunks: Iterable[bytes], total_bytes: int, linger_s: float) -> None:
    """Sends a file, and ends the connection.

    Args:
        connection: the tenant's connection.
        chunks: the file's bytes, in chunks of any size.
        total_bytes: how many bytes these are together.
        linger_s: the seconds that the tenant may take to close the connection.

    Raises:
        OSError: the tenant disconnected, or did not read everything in time.
    """
    give_up_at = time.monotonic() + deadline_s(total_bytes)
    for message in data_frames(chunks, total_bytes):
        connection.send(message)
        while connection.has_unsent:
            left = give_up_at - time.monotonic()
            if left <= 0:
                raise TimeoutError("the tenant did not read a file in time")
            connection.wait_to_send(left)
    connection.finish(linger_s)
