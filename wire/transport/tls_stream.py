"""This module is the tenant's end of a stream without gRPC: on the provider's tensor port, which `connect` opens, or on
a Unix socket (wire/transport/ipc)."""

from __future__ import annotations

import socket
import ssl

from wire.errors import MalformedFrame, Unavailable
from wire.transport.busy_poll import tenants_most_s
from wire.transport.identity import TlsIdentity
from wire.transport.message_socket import MessageSocket
from wire.transport.tls_context import client_context
from wire.transport.tls_socket import handshake

_CONNECT_TIMEOUT_S = 3.0
"""The most seconds to wait for the TCP connection. If a firewall silently drops packets to the tensor port, the first
request is delayed by this time, and gRPC carries the stream."""


def connect(host: str, port: int, identity: TlsIdentity) -> TensorStream:
    """Opens a stream to a provider's tensor port.

    Args:
        host: the host of the provider's URL; the provider's certificate must name it.
        port: the tensor port from the provider's manifest.
        identity: the tenant's certificate and key.

    Raises:
        ConfigurationError: the environment variable for polling is wrong; see `busy_poll.tenants_most_s`.
        OSError: nothing listens or answers there, or the peer is not the expected provider (`ssl.SSLError`).
    """
    busy_poll_s = tenants_most_s()
    context = client_context(identity.ca_pem, identity.cert_pem, identity.key_pem)
    plain = socket.create_connection((host, port), _CONNECT_TIMEOUT_S)
    return TensorStream(handshake(plain, context, host, busy_poll_s))


class TensorStream:
    """Implements `MessageStream` over a `MessageSocket`: TLS to the provider's tensor port, or a Unix socket."""

    def __init__(self, connection: MessageSocket) -> None:
        """Makes a stream over a connection whose handshake is done, and which nothing else may use."""
        self._connection = connection
        self._end: Exception | None = None
        self._is_active = True

    def send(self, message: bytes | memoryview) -> None:
        """Queues a message to be sent; see `MessageStream.send`."""
        try:
            self._connection.send(message)
        except OSError:
            self._is_active = False  # The next `step` raises the reason.

    @property
    def has_unsent(self) -> bool:
        """Tells whether queued messages still need a `step`; see `MessageStream.has_unsent`."""
        return self._is_active and self._connection.has_unsent

    def wait_to_send(self, seconds: float) -> None:
        """Waits until more can be sent; see `MessageStream.wait_to_send`."""
        try:
            self._connection.wait_to_send(seconds)
        except OSError:
            self._is_active = False

    def step(self) -> bytes | memoryview | None:
        """Waits for a message; see `MessageStream.step`."""
        message = self._connection.next_message()
        if message is None and self._end is None:
            try:
                self._connection.wait()
            except (EOFError, OSError, MalformedFrame) as exc:
                self._end, self._is_active = exc, False
            message = self._connection.next_message()
        if message is None and self._end is not None:
            self._connection.release()
            self._raise()
        return message

    def _raise(self) -> None:
        if isinstance(self._end, EOFError):
            raise EOFError
        if isinstance(self._end, MalformedFrame):
            raise self._end
        what = "TLS failed" if isinstance(self._end, ssl.SSLError) else "the connection to the provider broke"
        raise Unavailable(
            f"{what}; a fine-tuning run that broke goes on from its last checkpoint when it is started again"
        )

    def is_active(self) -> bool:
        """Tells whether the stream is active; see `MessageStream.is_active`."""
        return self._is_active

    def close(self) -> None:
        """Ends the stream and closes its connection; see `MessageStream.close`."""
        self._is_active = False
        self._connection.close()
