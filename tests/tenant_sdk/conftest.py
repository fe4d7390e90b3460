"""Provides one tiny chat model for all tests, served with its own weights and with int8 weights, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attacks.programs.overflow import HONEST, Fault, Overflower
from provider.model.served_model import ServedModel
from tenant_sdk import TenantClient, embedded
from tests.support.false_providers import MASKS, Opened
from tests.support.providers import make_served_model
from tests.support.tiny_models import make_chat_model
from wire.transport.inproc import InprocConnection


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provides the folder of a tiny chat model, which is a Llama."""
    return make_chat_model(tmp_path_factory.mktemp("chat") / "tiny")


@pytest.fixture(scope="session")
def chat_served_model(chat_folder: Path) -> ServedModel:
    """Provides the chat model, served with its own weights."""
    return make_served_model(chat_folder)


@pytest.fixture(scope="session")
def served_model(chat_folder: Path) -> ServedModel:
    """Provides the chat model, served with int8 weights."""
    return make_served_model(chat_folder, "int8")


@pytest.fixture(scope="session")
def chat_client(chat_folder: Path) -> Iterator[TenantClient]:
    """Provides a client with native weights, float arithmetic and no mask, so that its results equal local ones up to
    rounding."""
    cache = chat_folder.with_name("cache")
    with TenantClient(f"inproc:{chat_folder}", weights="native", mask="off", arithmetic="float", cache=cache) as client:
        yield client


@pytest.fixture
def opened(served_model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Provides a function that makes clients of a provider with a fault. It returns each client with its provider; its
    argument `mask` is a key of MASKS."""
    clients: list[TenantClient] = []

    def make(
        fault: Fault = HONEST, mask: str = "off", served_model: ServedModel = served_model, **options: Any
    ) -> tuple[TenantClient, Overflower]:
        provider = Overflower(served_model, fault)
        monkeypatch.setattr(embedded, "connect_inproc", lambda *_: InprocConnection(provider))
        options = {"cache": tmp_path / "cache", "progress": False, **MASKS[mask], **options}
        clients.append(TenantClient("inproc:x", **options))
        return clients[-1], provider

    yield make
    for client in clients:
        client.close()
