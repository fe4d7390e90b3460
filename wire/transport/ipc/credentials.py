"""This module asks the kernel which process is at the other end of a socket, and compares this with what that process
states about itself.

Inside TLS, each end states its own process id and user id, and the ids that it sees at the other end. If another
process stands between the two ends and passes bytes on, each end sees that process's ids, which differ from those that
the true other end states.
Ids are those of the reader's namespaces. Ends in different process namespaces (two containers) see no id at all (0), or
one that differs, and are refused.

Not guaranteed: the system gives the id of a process that has ended to a later one, so another process of the provider's
own user may have the same id. No other user's process can have the same user id; root and the provider's own user can
read the provider's memory anyway.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

from wire.errors import ConfigurationError, MalformedFrame, WrongPeer

_UCRED = struct.Struct("iII")
"""`struct ucred` of Linux: process id, user id and group id (unix(7), SO_PEERCRED)."""
_STATEMENT = struct.Struct("<4sIIII")
_MAGIC = b"PEER"
STATEMENT_BYTES = _STATEMENT.size


@dataclass(frozen=True)
class Credentials:
    """Holds the process id and the effective user id of one end."""

    pid: int
    uid: int


def own() -> Credentials:
    """Returns the credentials of this process."""
    return Credentials(os.getpid(), os.geteuid())


def check_system() -> None:
    """Raises ConfigurationError if the system does not say which process is at the other end of a socket."""
    if not hasattr(socket, "SO_PEERCRED"):
        raise ConfigurationError("sockets of this host need SO_PEERCRED, which this system does not have: use grpcs://")


def of_peer(plain: socket.socket) -> Credentials:
    """Returns the credentials of the process at the other end: the one that connected, or the one that made the
    listening socket.

    Raises:
        ConfigurationError: the system does not tell them.
    """
    check_system()
    try:
        pid, uid, _ = _UCRED.unpack(plain.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    except (OSError, struct.error):
        raise ConfigurationError("the kernel does not say which process is at a socket's other end") from None
    return Credentials(pid, uid)


def statement(mine: Credentials, seen: Credentials) -> bytes:
    """Returns, as bytes, what one end states: `mine`, its own credentials, and `seen`, those at the other end."""
    return _STATEMENT.pack(_MAGIC, mine.pid, mine.uid, seen.pid, seen.uid)


def check_statement(data: bytes, mine: Credentials, seen: Credentials) -> None:
    """Compares the other end's statement with what this end knows.

    Args:
        data: `STATEMENT_BYTES` bytes from the other end.
        mine: this end's own credentials.
        seen: the credentials that this end sees at the other end.

    Raises:
        MalformedFrame: the bytes are no statement.
        WrongPeer: the two ends are not each other's peers.
    """
    magic, *numbers = _STATEMENT.unpack(data)
    if magic != _MAGIC:
        raise MalformedFrame("the peer did not state which process it is")
    if numbers != [seen.pid, seen.uid, mine.pid, mine.uid]:
        raise WrongPeer(
            "another process stands between this one and the peer that showed the certificate, or the two are in "
            "different containers: nothing was sent"
        )
