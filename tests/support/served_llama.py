"""Serves a tiny Llama in this process, once for each test module."""

from __future__ import annotations

from pathlib import Path

import pytest

from provider.embedded import serve_in_process
from provider.model.served_model import ServedModel
from tests.support.tiny_models import make_tiny


@pytest.fixture(scope="module")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """Provides a tiny Llama with int8 weights."""
    folder: Path = tmp_path_factory.mktemp("model") / "llama"
    make_tiny("llama", folder)
    return serve_in_process(str(folder))
