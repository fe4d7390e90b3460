"""A provider behind a real loopback port with mutual TLS, and tenants with real identities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from provider.identity.authority import StateDir
from provider.identity.registry import enroll
from provider.model.load import load, resolve
from provider.model.served_model import ServedModel
from provider.model.weights import serve_model
from provider.net.admission import Admission
from provider.net.server import Server
from provider.net.service import ProviderService
from tests.conftest import make_tiny
from wire.limits import Limits
from wire.transport.grpc_connection import GrpcConnection
from wire.transport.identity import TlsIdentity

LIMITS = Limits(max_rows=4096, max_tensor_bytes=2 << 20, max_in_flight_bytes=3 << 20)
"""Small, so that tests can reach them; a chunk is 1 MiB."""


@dataclass
class Provider:
    state: StateDir
    server: Server
    served_model: ServedModel
    folder: Path
    service: ProviderService
    connections: list[GrpcConnection] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"grpcs://127.0.0.1:{self.server.port}"

    def identity(self, name: str = "acme") -> TlsIdentity:
        out = self.folder / name
        if not out.exists():
            enroll(self.state, name, out, self.url)
        return TlsIdentity.read(out)

    def connect(self, name: str = "acme") -> GrpcConnection:
        connection = GrpcConnection(self.url, self.identity(name))
        self.connections.append(connection)
        return connection


@pytest.fixture(scope="session")
def tiny_served_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = tmp_path_factory.mktemp("rpc") / "llama"
    make_tiny("llama", folder)
    return ServedModel(serve_model(load(resolve(str(folder))), limits=LIMITS))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Provider]]:
    running: list[Provider] = []

    def run(served_model: ServedModel, admission: Admission | None = None, tensor_port: int | None = 0) -> Provider:
        state = StateDir(tmp_path / f"state{len(running)}")
        server = Server("127.0.0.1", 0, state, tensor_port=tensor_port)
        service = server.start(served_model, admission=admission)
        running.append(Provider(state, server, served_model, tmp_path / f"tenants{len(running)}", service))
        return running[-1]

    yield run
    for one in running:
        for connection in one.connections:
            connection.close()
        one.server.stop()


@pytest.fixture
def provider(start: Callable[[ServedModel], Provider], tiny_served_model: ServedModel) -> Provider:
    return start(tiny_served_model)
