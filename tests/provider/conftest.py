"""What the tests of the provider share."""

from __future__ import annotations

from pathlib import Path

import pytest

from provider.embedded import make_core
from provider.model.served_model import ProviderCore
from tests.conftest import make_tiny


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> ProviderCore:
    """Of a tiny Llama."""
    folder: Path = tmp_path_factory.mktemp("model") / "llama"
    make_tiny("llama", folder)
    return make_core(str(folder))
