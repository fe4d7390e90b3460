"""Provides a tiny model, and one endpoint that serves it with two adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tenant_sdk import TenantClient
from tenant_sdk.endpoint.server import Endpoint
from tenant_sdk.testing import save_tiny_model
from tests.support.endpoints import endpoint_of
from tests.support.saved_adapters import save_adapter
from tests.support.tiny_models import open_client


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("endpoint") / "llama")


@pytest.fixture(scope="package")
def client(folder: Path) -> Iterator[TenantClient]:
    with open_client(folder) as opened:
        yield opened


@pytest.fixture(scope="package")
def adapters(client: TenantClient, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("support", "sales")):
        save_adapter(client.load_model(), root / name, seed)
    return root


@pytest.fixture(scope="package")
def endpoint(client: TenantClient, adapters: Path) -> Iterator[Endpoint]:
    with endpoint_of(client, adapters) as serving:
        yield serving
