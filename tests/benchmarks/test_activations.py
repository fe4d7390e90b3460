"""Tests the tables and plots of activation memory: shares are of local PEFT, and what was not measured says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.activations import columns, plot, table

RESULTS = {
    "lora": {
        "2048": {"local": {"peak_mb": 3000.0}, "replies": {"peak_mb": 300.0}},
        "1024": {"local": {"peak_mb": 2000.0}, "pruned": {"peak_mb": 1000.0}, "recompute": {"peak_mb": 1.0}},
        "16384": {"replies": {"peak_mb": 2500.0}},
    },
    "prefix": {"1024": {"local": {"peak_mb": 1234.5}}},
}


def test_tables() -> None:
    by_adapter, by_length = columns(RESULTS, 1024)
    assert list(by_adapter) == ["LoRA", "prefix tuning"]
    assert list(by_length) == ["1 × 1,024", "1 × 2,048", "1 × 16,384"]
    lines = dict(line.strip("| ").split(" | ", 1) for line in table(by_length).splitlines()[2:])
    assert lines["local transformers + PEFT"] == "2,000 | 3,000 | not measured"
    assert lines["+ pruned graph: `checkpointing=None`"] == "1,000 (50.0%) | not measured | not measured"
    assert lines['`checkpointing="replies"`, all on disk'] == "not measured | 300 (10.0%) | 2,500"
    assert "1,234 |" not in table(by_length)
    assert "2,000 | 1,234" in table(by_adapter)


def test_the_same_results_give_the_same_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _, by_length = columns(RESULTS, 1024)
    for name in ("one.svg", "two.svg"):
        plot(by_length, tmp_path / name)
    one = (tmp_path / "one.svg").read_text()
    assert one == (tmp_path / "two.svg").read_text()
    assert "1 × 16,384" in one
