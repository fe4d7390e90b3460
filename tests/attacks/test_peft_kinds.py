"""Tests `--peft KIND`: an adapter of each kind is stolen without a mask, and is not stolen through the lattice mask."""

from __future__ import annotations

from pathlib import Path

import pytest

from attacks import extract_lora
from attacks.report import verdict
from attacks.report.table import Result
from tests.support.attack_report import read


def values(results: list[Result], mask: str, arithmetic: str, metric: str) -> dict[str, float]:
    here = [one for one in results if (one.mask, one.arithmetic, one.finding.metric) == (mask, arithmetic, metric)]
    return {one.finding.module: one.finding.value for one in here}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ia3", "oft", "boft"])
def test_it_falls_without_a_mask_and_holds_with_one(kind: str, tmp_path: Path, no_controls: None) -> None:
    """All three adapters change v and either q or k. IA3's change of the input of down_proj is found as an equal change
    of up_proj."""
    options = ["--peft", kind, "--masks", "off,lattice", "--adversaries", "closed-form", "--out", str(tmp_path)]
    assert extract_lora.main(options) == 0
    results = read(tmp_path)
    errors = values(results, "off", "float", "relative error")
    assert errors["v_proj"] < 1e-5
    assert errors["q·k"] < 0.02
    assert values(results, "off", "ring", "relative error")["v_proj"] < 0.1
    for arithmetic in ("float", "ring"):
        assert values(results, "off", arithmetic, "stolen task gain")["adapter"] > 0.95
    base = {one.finding.baseline for one in results if one.finding.metric == "agreement of answers"}
    assert values(results, "lattice", "ring", "agreement of answers").get("adapter", 0.0) < max(base) + 0.1
    assert all(error > 0.9 for error in values(results, "lattice", "ring", "relative error").values())
    assert verdict.weakened(results) == []
