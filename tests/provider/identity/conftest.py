"""Provides a folder for a certificate authority that has not been opened yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from provider.identity.authority import StateDir


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "state")
