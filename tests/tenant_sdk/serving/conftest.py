"""Provides a tiny Llama and a client of it for all tests of serving, and makes the fixtures of tests/support that they
share known to pytest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tenant_sdk import TenantClient
from tests.support.engines import batch_calls  # noqa: F401
from tests.support.tiny_models import make_model, open_client


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provides the folder of a tiny Llama, which no test changes."""
    return make_model("llama", tmp_path_factory.mktemp("serving") / "llama")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[TenantClient]:
    """Provides a client of the tiny Llama, whose results equal local ones."""
    with open_client(folder) as opened:
        yield opened
