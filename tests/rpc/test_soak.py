"""Runs benchmarks/soak.py on a tiny model until every process of tenants has had some answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import soak
from tests.support.tiny_models import make_tiny


@pytest.mark.slow
def test_nothing_is_lost_wrong_or_left_behind(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path / "tiny")
    found = soak(5.0, str(tmp_path / "tiny"), "*", kill_every_s=5.0, least_answers=100)
    assert (found.wrong, found.lost, found.left) == (0, 0, (0, 0))
    assert found.deaths >= 1
    assert (
        found.answered >= 500
    )  # of four processes and of the one that was killed; growth shows only in a long run: `python -m benchmarks.soak`
