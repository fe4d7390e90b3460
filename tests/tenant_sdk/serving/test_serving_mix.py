"""Tests the random mix of requests of benchmarks/serving_mix.py: a short run on the real model finds no fault, and a
result with a fault does not count as good."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.row_watch import RowBalance
from benchmarks.serving_mix import LOAD_EVERY, READ_EVERY, Loads, Mix
from tests.support.waiting import SLOW_TIMEOUT_S

NUM_ANSWERS = 42
"""The number of answers of a short run. More requests are open at a time than end in a third of it, and adapters are
loaded when requests begin, so loads and reads are counted over the whole run."""
LIMIT_S = 3 * SLOW_TIMEOUT_S
"""The reference answers alone, one for each adapter and prompt, take minutes on a machine that does something else."""
THIRD = 200
LOADED = Loads(THIRD, THIRD // LOAD_EVERY, THIRD // READ_EVERY)
"""The fewest loads and reads that suffice in a third of a run of 600 answers."""
ROWS = RowBalance(made=100, sent=80, refused=3, burnt=2, ready=15)
GOOD = Mix(wanted=3 * THIRD, right=3 * THIRD, cancelled=2, deaths=1, loads=(LOADED,) * 3, rows=ROWS, distinct=5)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.real_model
def test_no_answer_is_wrong_and_nothing_is_lost_or_used_twice() -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.serving_mix", str(NUM_ANSWERS)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
    assert int(ran.stdout.removeprefix("answers: ").split(" right, 0 wrong, ")[0]) >= NUM_ANSWERS
    assert "provider killed 0 times" not in ran.stdout
    loads, reads = re.findall(r"adapters: (\d+) loads onto the device and (\d+) reads", ran.stdout)[0]
    assert min(int(loads), int(reads)) >= 3
    assert ran.stdout.count("of these twice: 0") == 1
    assert ran.stdout.count("still ready, 0 lost") == 1
    assert ran.stdout.count("adapter places lost: 0") == 1


@pytest.mark.parametrize(
    "change",
    [
        {"wrong": 1},
        {"other": ["NotFinite"]},
        {"rows": dataclasses.replace(ROWS, twice=1)},
        {"rows": dataclasses.replace(ROWS, made=101)},
        {"rows": dataclasses.replace(ROWS, sent=81)},
        {"rows": dataclasses.replace(ROWS, refused=2)},
        {"rows": dataclasses.replace(ROWS, burnt=1)},
        {"rows": dataclasses.replace(ROWS, ready=14)},
        {"rows": RowBalance()},
        {"left": (1, 0, 0)},
        {"left": (0, 1, 0)},
        {"left": (0, 0, 1)},
        {"lost_places": 1},
        {"lost_places": -1},
        {"loads": (LOADED, LOADED, dataclasses.replace(LOADED, device_loads=LOADED.device_loads - 1))},
        {"loads": (LOADED, dataclasses.replace(LOADED, disk_reads=LOADED.disk_reads - 1), LOADED)},
        {"loads": (dataclasses.replace(LOADED, answers=2 * THIRD), LOADED, LOADED)},
        {"loads": (LOADED, LOADED)},
        {"right": GOOD.wanted - 1},
        {"cancelled": 0},
        {"distinct": 3},
    ],
)
def test_the_mix_notices(change: dict[str, Any]) -> None:
    assert GOOD.is_good
    assert not dataclasses.replace(GOOD, **change).is_good
