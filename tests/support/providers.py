"""Serves models in this process or on loopback, with real identities and mutual TLS, and finds and changes parts of a
running provider."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import provider.identity.revocations as revocations
from provider.embedded import serve_in_process
from provider.identity.authority import StateDir
from provider.identity.registry import enroll
from provider.model.load import load, resolve
from provider.model.served_model import ServedModel
from provider.model.weights import serve_model
from provider.net.ports import TensorPort
from provider.net.server import Server
from provider.net.service import ProviderService
from provider.net.session import Session
from tests.support.tiny_models import make_tiny
from tests.support.waiting import until
from wire.frame import Call
from wire.limits import Limits
from wire.transport.grpc_connection import GrpcConnection
from wire.transport.identity import TlsIdentity
from wire.transport.ipc.connection import IpcConnection


def make_served_model(folder: Path, weights: Any = "native", limits: Limits | None = None) -> ServedModel:
    """Returns the served model of a folder, as a provider makes it."""
    return ServedModel(serve_model(load(resolve(str(folder))), weights, limits=limits))


@contextmanager
def serving(served_model: Any, port: int = 0, state: Any = None) -> Iterator[Server]:
    """Serves a model on loopback inside the context, with TLS if a state folder is given."""
    server = Server("127.0.0.1", port, state)
    server.start(served_model)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """Provides a tiny Llama with int8 weights."""
    folder: Path = tmp_path_factory.mktemp("model") / "llama"
    make_tiny("llama", folder)
    return serve_in_process(str(folder))


class WrappedModel:
    """Passes all attributes on to a served model, but makes every product go through `compute`."""

    def __init__(self, served_model: Any) -> None:
        self.served_model = served_model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.served_model, name)

    def row_product(self, call: Call) -> None:
        """Returns None, so that `compute` computes every product, also for a single row."""


class SwitchedModel(WrappedModel):
    """Computes each product by `make`, which is the served model's function at first. A test may replace `make` while a
    provider runs."""

    def __init__(self, served_model: Any) -> None:
        super().__init__(served_model)
        self.make: Callable[..., torch.Tensor] = served_model.compute

    def compute(self, *arguments: Any) -> torch.Tensor:
        """Returns the result of `make`."""
        return self.make(*arguments)


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


def service_of(provider: Provider) -> ProviderService:
    """Returns the service of a running provider."""
    return provider.service


def session_of(provider: Provider, tenant: str) -> Session:
    """Waits until a tenant has a session, and returns the session."""
    service = service_of(provider)
    until(lambda: any(one.tenant == tenant for one in service.sessions), f"a session of {tenant}")
    return next(one for one in service.sessions if one.tenant == tenant)


def tensors_of(provider: Provider) -> TensorPort:
    """Returns the tensor port of a running provider."""
    assert provider.server.tensors is not None
    return provider.server.tensors


QUICK_S = 0.05
"""The seconds between two sweeps in these tests. A provider in use sweeps less often."""


class Fault:
    """Makes every read of the registry fail until `is_over` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.is_over, stamp = False, revocations._stamp

        def fail(status: os.stat_result) -> Any:
            if not self.is_over:
                raise OSError(number, os.strerror(number))
            return stamp(status)

        monkeypatch.setattr(revocations, "_stamp", fail)
