"""One tiny chat model a session; clients with native weights and float arithmetic, so that results equal local ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from provider.model.served_model import ServedModel
from tenant_sdk import TenantClient
from tests.support.chat_model import make_chat_model
from tests.support.serving import make_served_model


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("chat") / "tiny")


@pytest.fixture(scope="session")
def chat_served_model(chat_folder: Path) -> ServedModel:
    return make_served_model(chat_folder)


@pytest.fixture(scope="session")
def chat_client(chat_folder: Path) -> Iterator[TenantClient]:
    cache = chat_folder.with_name("cache")
    with TenantClient(f"inproc:{chat_folder}", weights="native", mask="off", arithmetic="float", cache=cache) as client:
        yield client
