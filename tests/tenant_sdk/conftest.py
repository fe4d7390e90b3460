"""One tiny chat model a session; clients with native weights and float arithmetic, so that results equal local ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from provider.model.served_model import ServedModel
from tenant_sdk import TenantClient
from tests.tenant_sdk import tiny


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.chat_model(tmp_path_factory.mktemp("chat") / "tiny")


@pytest.fixture(scope="session")
def chat_served_model(chat_folder: Path) -> ServedModel:
    return tiny.make_served_model(chat_folder)


@pytest.fixture(scope="session")
def chat_client(chat_folder: Path) -> Iterator[TenantClient]:
    cache = chat_folder.with_name("cache")
    with TenantClient(f"inproc:{chat_folder}", weights="native", mask="off", arithmetic="float", cache=cache) as client:
        yield client
