"""Provides a tiny chat model whose context is long enough for the examples' rows, and a folder that looks like the
repository's root."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tenant_sdk.testing import save_tiny_model
from tests.support.repository import ROOT


@pytest.fixture(scope="session")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provides a tiny chat model. Each character is one token, so a row of the examples has up to some hundred
    tokens."""
    folder = tmp_path_factory.mktemp("examples") / "tiny-chat"
    return save_tiny_model(folder, num_hidden_layers=1, tie_word_embeddings=True)


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    """Provides an empty folder with `examples` in it, in which documented commands are run."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    return folder


@pytest.fixture
def env(tmp_path: Path, tiny_chat: Path) -> dict[str, str]:
    """Provides the environment: commands on the path, and the provider's settings (model, port and state) as
    variables."""
    scripts = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "VEILBASE_CACHE": str(tmp_path / "cache"),
        "VEILBASE_PROVIDER_MODEL": str(tiny_chat),
        "VEILBASE_PROVIDER_PORT": "0",
        "VEILBASE_PROVIDER_STATE": str(tmp_path / "state"),
        "VERIFY": str(tiny_chat),
        "STEPS": "2",
        "TOKENS": "3",
    }
