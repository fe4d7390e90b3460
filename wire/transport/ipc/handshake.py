"""This module does the handshake on a Unix socket: mutual TLS, and inside it a statement from each end, which says
which processes are at the two ends. After that, nothing is encrypted (wire/SPEC.md, section 1).

Guarantees: frames go unencrypted only after TLS has verified both certificates and each end has compared the other
end's statement with what the kernel says. The socket must be AF_UNIX: on any other socket, this raises an error before
a byte is sent. The handshake has an application protocol of its own, so a peer on a TCP port cannot be led into it.
Each end sends `clear` as its last message inside TLS. The tenant sends it first, and sends nothing more until it
receives the provider's `clear`; other bytes that arrive earlier are an error and never part of a frame.
"""

from __future__ import annotations

import contextlib
import socket
import ssl

from wire.errors import ConfigurationError, MalformedFrame
from wire.transport.ipc import credentials
from wire.transport.ipc.clear_socket import ClearSocket
from wire.transport.tls_context import IPC_ALPN
from wire.transport.tls_handshake import TlsPipe, shake_hands

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
        mine, seen = credentials.own(), credentials.of_peer(plain)
        pipe = shake_hands(plain, context, SERVER_NAME, IPC_ALPN, HANDSHAKE_TIMEOUT_S)
        with contextlib.suppress(ConnectionError):  # A provider that refused and left said why; it is heard next.
            pipe.say(credentials.statement(mine, seen))
        credentials.check_statement(pipe.hear(credentials.STATEMENT_BYTES), mine, seen)
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
        mine, seen = credentials.own(), credentials.of_peer(plain)
        pipe = shake_hands(plain, context, None, IPC_ALPN, HANDSHAKE_TIMEOUT_S)
        theirs = pipe.hear(credentials.STATEMENT_BYTES)
        pipe.say(credentials.statement(mine, seen))
        credentials.check_statement(theirs, mine, seen)
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
