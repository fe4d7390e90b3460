"""Listens at the tensor port, which carries the tenants' streams over TLS without gRPC (wire/SPEC.md, section 1).

gRPC's `Stream` carries the same frames for tenants that cannot reach this port.

Guarantees: a peer without a certificate of the provider's CA fails the handshake, and the handshake has a deadline.
Connections are bounded as `provider.net.stream_port` says.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable

from provider.net.descriptors import MOST_STREAMS
from provider.net.stream_port import BACKLOG, Serve, StreamPort
from wire.errors import ConfigurationError
from wire.transport.tls_socket import handshake


class TensorPort(StreamPort):
    """Holds the bound tensor port; `start` begins to accept connections."""

    def __init__(self, host: str, port: int, most: int = MOST_STREAMS) -> None:
        """Binds the TCP port; connections then wait until `start` begins to accept them.

        Args:
            host: an address or a name of this machine.
            port: the port's number; 0 picks a free one.
            most: the largest number of open connections; fewer than `MAX_CONNECTIONS` if the process may open only a
                few files.

        Raises:
            ConfigurationError: the port is in use, or the address is not an address of this machine.
        """
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            # As with gRPC, "::" also accepts IPv4.
            both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            listener = socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=both)
        except OSError as exc:
            raise ConfigurationError(
                f"cannot listen on {host}, port {port}, for tensors: is it in use, or not an address of this machine?"
            ) from exc
        super().__init__(listener, most)
        self.port: int = listener.getsockname()[1]

    def start(self, context: Callable[[], ssl.SSLContext], serve: Serve) -> None:
        """Starts a thread that accepts connections to the port.

        Args:
            context: returns the newest TLS context; called at each handshake.
            serve: see `StreamPort.accept`.
        """
        self.accept(lambda plain: handshake(plain, context()), serve, "veilbase-tensors")
