"""Tests a model whose output head stays with the tenant: a training step reveals the model's last down_proj."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attacks import extract_lora


@pytest.mark.slow
def test_the_adapter_of_a_gpt2_model_is_stolen_whole(tmp_path: Path, no_controls: None) -> None:
    thieves = "closed-form,gradient-equations"
    options = ["--model", "tiny-gpt2", "--masks", "off", "--adversaries", thieves, "--out", str(tmp_path)]
    assert extract_lora.main(options) == 0
    found = {
        (one["adversary"], one["arithmetic"], one["module"], one["metric"]): one
        for one in json.loads((tmp_path / "report.json").read_text())["results"]
    }

    def value(adversary: str, module: str, metric: str, arithmetic: str = "float") -> float:
        return float(found[adversary, arithmetic, module, metric]["value"])

    for module in ("o_proj", "down_proj", "v_proj", "up_proj", "q·k"):
        assert value("closed-form", module, "relative error") <= 1e-3, module
        assert ("closed-form", "float", f"{module} (1 of 2 layers)", "relative error") not in found
    assert value("closed-form", "adapter", "stolen task gain") >= 0.9
    assert value("gradient-equations", "down_proj", "relative error") <= 1e-3
    assert 0.1 < value("gradient-equations", "adapter", "stolen task gain") < 0.9, "down_proj is not all of it"
    low, high = found["closed-form", "float", "adapter", "stolen task gain"]["spread"]
    assert 0.9 <= low <= high
    # In ring arithmetic the last down_proj stays hidden, and the table must say so.
    assert found["closed-form", "ring", "down_proj (1 of 2 layers)", "relative error"]["verdict"] == "no claim"
    assert found["gradient-equations", "ring", "–", "–"]["verdict"] == "no claim"
