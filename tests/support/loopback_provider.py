"""Runs a provider behind a real loopback port with mutual TLS, and makes tenants with real identities."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from provider.identity.authority import StateDir
from provider.identity.registry import enroll
from provider.model.served_model import ServedModel
from provider.net.server import Server
from provider.net.service import ProviderService
from wire.limits import Limits
from wire.transport.grpc_connection import GrpcConnection
from wire.transport.identity import TlsIdentity
from wire.transport.ipc.connection import IpcConnection

LIMITS = Limits(max_rows=4096, max_tensor_bytes=2 << 20, max_in_flight_bytes=3 << 20)
"""Limits that are small enough for tests to reach. A chunk is 1 MiB."""


@dataclass
class Provider:
    """Serves a model on loopback, and enrolls tenants."""

    state: StateDir
    server: Server
    served_model: ServedModel
    folder: Path
    service: ProviderService
    connections: list[GrpcConnection | IpcConnection] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Returns the provider's URL."""
        return f"grpcs://127.0.0.1:{self.server.port}"

    def identity(self, name: str = "acme") -> TlsIdentity:
        """Returns the identity of a tenant. The first call for a name enrolls the tenant."""
        out = self.folder / name
        if not out.exists():
            enroll(self.state, name, out, self.url)
        return TlsIdentity.read(out)

    @property
    def ipc_url(self) -> str:
        """Returns the URL at which tenants of the same host find the provider."""
        assert self.server.ipc is not None
        return f"ipc:{self.server.ipc.folder}"

    def connect(self, name: str = "acme") -> GrpcConnection | IpcConnection:
        """Returns a tenant's connection, on the socket of one host if the provider has one. The connection is closed
        together with the provider."""
        connection: GrpcConnection | IpcConnection
        if self.server.ipc is None:
            connection = GrpcConnection(self.url, self.identity(name))
        else:
            connection = IpcConnection(self.ipc_url, self.identity(name))
        self.connections.append(connection)
        return connection
