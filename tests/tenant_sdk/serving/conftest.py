"""Provides a tiny Llama and a client of it for all tests of serving, and counts the adapters that are computed
together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from tenant_sdk import TenantClient
from tenant_sdk.serving.adapters.module_stack import ModuleBatch
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


@pytest.fixture
def batch_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Provides a list to which every call of a batch adds the number of its modules."""
    made: list[int] = []
    run = ModuleBatch.outputs

    def counted(batch: ModuleBatch, modules: Sequence[nn.Module], *rows: torch.Tensor) -> torch.Tensor:
        made.append(len(modules))
        return run(batch, modules, *rows)

    monkeypatch.setattr(ModuleBatch, "outputs", counted)
    return made
