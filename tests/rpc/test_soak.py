"""Runs benchmarks/soak.py for a short time on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import soak
from tests.support.tiny_models import make_tiny


@pytest.mark.slow
def test_nothing_is_lost_wrong_or_left_behind(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path / "tiny")
    found = soak(20.0, str(tmp_path / "tiny"), "*", kill_every_s=7.0)
    assert (found.wrong, found.lost, found.left) == (0, 0, (0, 0))
    assert found.deaths >= 1
    assert found.answered > 200  # growth shows only in a long run: `python -m benchmarks.soak`
