"""Provides a provider behind a real loopback port with mutual TLS, and tenants with real identities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from provider.identity.authority import StateDir
from provider.model.load import load, resolve
from provider.model.served_model import ServedModel
from provider.model.weights import serve_model
from provider.net import service as service_module
from provider.net.admission import Admission
from provider.net.server import Server
from provider.net.windows import Windows
from provider.shards.router import Shard
from tests.support.providers import LIMITS, QUICK_S, Provider
from tests.support.tiny_models import make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provides the folder of a tiny Llama, for the `provider` command."""
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    make_tiny("llama", folder)
    return folder


@pytest.fixture(scope="session")
def tiny_served_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = tmp_path_factory.mktemp("rpc") / "llama"
    make_tiny("llama", folder)
    return ServedModel(serve_model(load(resolve(str(folder))), limits=LIMITS))


@pytest.fixture
def quick_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes sweeps frequent. This fixture must come before `provider`, whose first wait begins when it starts."""
    monkeypatch.setattr(service_module, "SWEEP_S", QUICK_S)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Provider]]:
    running: list[Provider] = []

    def run(
        served_model: ServedModel,
        admission: Admission | None = None,
        tensor_port: int | None = 0,
        ipc: bool = False,
        windows: Windows | None = None,
        shards: list[Shard] | None = None,
    ) -> Provider:
        state = StateDir(tmp_path / f"state{len(running)}")
        folder = tmp_path / f"ipc{len(running)}" if ipc else None
        server = Server("127.0.0.1", 0, state, tensor_port=tensor_port, ipc=folder)
        service = server.start(served_model, shards, admission, windows=windows)
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
