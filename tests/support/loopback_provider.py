"""A provider behind a real loopback port with mutual TLS, and tenants of it with real identities."""

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
"""Small, so that tests can reach them; a chunk is 1 MiB."""


@dataclass
class Provider:
    """Serves on loopback, and makes tenants of its own."""

    state: StateDir
    server: Server
    served_model: ServedModel
    folder: Path
    service: ProviderService
    connections: list[GrpcConnection | IpcConnection] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Where tenants find it."""
        return f"grpcs://127.0.0.1:{self.server.port}"

    def identity(self, name: str = "acme") -> TlsIdentity:
        """Returns the identity of a tenant, which is enrolled the first time."""
        out = self.folder / name
        if not out.exists():
            enroll(self.state, name, out, self.url)
        return TlsIdentity.read(out)

    @property
    def ipc_url(self) -> str:
        """Where tenants on this host find it."""
        assert self.server.ipc is not None
        return f"ipc:{self.server.ipc.folder}"

    def connect(self, name: str = "acme") -> GrpcConnection | IpcConnection:
        """Returns a connection of a tenant, on this host's socket if there is one. It is closed with the provider."""
        connection: GrpcConnection | IpcConnection
        if self.server.ipc is None:
            connection = GrpcConnection(self.url, self.identity(name))
        else:
            connection = IpcConnection(self.ipc_url, self.identity(name))
        self.connections.append(connection)
        return connection
