"""Tests the random mix of requests of benchmarks/serving_mix.py: a run of one minute on the real model finds no fault,
and a result with a fault does not count as good."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.serving_mix import Mix

GOOD = Mix(right=30, cancelled=2, deaths=1, rows=100, distinct=5)


@pytest.mark.slow
@pytest.mark.real_model
def test_no_answer_is_wrong_and_nothing_is_lost_or_used_twice() -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.serving_mix", "60"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
    assert " 0 wrong, " in ran.stdout
    assert "provider killed 0 times" not in ran.stdout
    assert ran.stdout.count("of these twice: 0") == 1


@pytest.mark.parametrize(
    "change",
    [{"wrong": 1}, {"other": ["NotFinite"]}, {"rows_twice": 1}, {"left": (1, 0, 0)}, {"left": (0, 0, 1)},
     {"right": 10}, {"cancelled": 0}, {"distinct": 3}],
)  # fmt: skip
def test_the_mix_notices(change: dict[str, Any]) -> None:
    assert GOOD.is_good
    assert not dataclasses.replace(GOOD, **change).is_good
