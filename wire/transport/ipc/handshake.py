"""This module does the handshake on a Unix socket: mutual TLS, and inside it a statement from each end, which says
which processes are at the two ends. After that, nothing is encrypted (wire/SPEC.md, section 1).

Each end states its own process id and user id, and the ids that the kernel gives it for the other end. If another
process stands between the two ends and passes bytes on, each end sees that process's ids, which differ from those that
the true other end states. Ids are those of the reader's namespaces. Ends in different process namespaces (two
containers) see no id at all (0), or one that differs, and are refused.

Guarantees: frames go unencrypted only after TLS has verified both certificates and each end has compared the other
end's statement with what the kernel says. The socket must be AF_UNIX: on any other socket, the handshake raises an
error before a byte is sent. It has an application protocol of its own, so a peer on a TCP port cannot be led into it.
Each end sends `clear` as its last message inside TLS. The tenant sends it first, and sends nothing more until it
receives the provider's `clear`; other bytes that arrive earlier are an error and never part of a frame.

Not guaranteed: that an id names one process for ever. The system gives the id of a process that has ended to a later
one, so another process of the provider's own user may have the same id. No other user's process can have the same user
id; root and the provider's own user can read the provider's memory anyway.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
from dataclasses import dataclass

from wire.errors import ConfigurationError, MalformedFrame, WrongPeer
from wire.transport.ipc.clear_socket import ClearSocket
from wire.transport.tls import IPC_ALPN, TlsPipe, shake_hands

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


HANDSHAKE_TIMEOUT_S = 10.0
SERVER_NAME = "localhost"
"""The name that every provider's certificate has (`provider.identity.authority`). A socket has no host name to check;
that the certificate is of the provider's CA is what counts."""
_CLEAR = b"clear"


def tenant_handshake(plain: socket.socket, context: ssl.SSLContext, busy_poll_s: float = 0.0) -> ClearSocket:
    """Does the tenant's part on a connected socket. If it fails, this closes the socket.

    Args:
        plain: a connected AF_UNIX socket, which belongs to the result from now on.
        context: the tenant's TLS context, for `IPC_ALPN`.
        busy_poll_s: see `MessageSocket`.

    Raises:
        ConfigurationError: the socket is not a Unix socket, or the system does not tell which process is at its other
            end.
        WrongPeer: the provider's statement differs from what the kernel says about the two ends.
        MalformedFrame: the peer does not follow the handshake.
        OSError: TLS was refused (`ssl.SSLError`) or took too long, or the connection broke.
    """
    try:
        _check_family(plain)
        mine, seen = own(), of_peer(plain)
        pipe = shake_hands(plain, context, SERVER_NAME, IPC_ALPN, HANDSHAKE_TIMEOUT_S)
        with contextlib.suppress(ConnectionError):  # A provider that refused and left said why; it is heard next.
            pipe.say(statement(mine, seen))
        check_statement(pipe.hear(STATEMENT_BYTES), mine, seen)
        pipe.say(_CLEAR)
        _hear_clear(pipe)
        return _cleared(pipe, busy_poll_s)
    except BaseException:
        plain.close()
        raise


def provider_handshake(plain: socket.socket, context: ssl.SSLContext) -> ClearSocket:
    """Does the provider's part on an accepted socket; see `tenant_handshake`, also for errors.

    The provider sends its statement before it checks the tenant's, so that the tenant also learns of a difference.
    """
    try:
        _check_family(plain)
        mine, seen = own(), of_peer(plain)
        pipe = shake_hands(plain, context, None, IPC_ALPN, HANDSHAKE_TIMEOUT_S)
        theirs = pipe.hear(STATEMENT_BYTES)
        pipe.say(statement(mine, seen))
        check_statement(theirs, mine, seen)
        _hear_clear(pipe)
        pipe.say(_CLEAR)
        return _cleared(pipe, 0.0)
    except BaseException:
        plain.close()
        raise


def _check_family(plain: socket.socket) -> None:
    if plain.family != socket.AF_UNIX:
        raise ConfigurationError("frames go unencrypted on a socket of this host only: expected AF_UNIX")


def _hear_clear(pipe: TlsPipe) -> None:
    if pipe.hear(len(_CLEAR)) != _CLEAR or pipe.has_more:
        raise MalformedFrame("the peer did not end the encrypted part as agreed")


def _cleared(pipe: TlsPipe, busy_poll_s: float) -> ClearSocket:
    return ClearSocket(pipe.plain, pipe.tls.getpeercert(binary_form=True) or b"", busy_poll_s)
