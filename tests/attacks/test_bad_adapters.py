"""Tests that an adapter and a recording that do not belong together give an error of one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from attacks.seen.public_model import describe
from attacks.truth.secrets import adapted_copy
from attacks.victim import models
from provider.model.load import load, resolve
from provider.model.weights import serve_model
from wire.errors import ConfigurationError


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    path = models.make("tiny-llama", tmp_path / "model")
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(path), config).save_pretrained(tmp_path / "adapter")
    return Path(path), tmp_path / "adapter"


def damaged(adapter: Path, how: str) -> None:
    tensors, weights = adapter / "adapter_model.safetensors", load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    if how == "no tensors":
        tensors.unlink()
    elif how == "half a file":
        tensors.write_bytes(tensors.read_bytes()[:100])
    elif how == "half its layers":
        save_file(dict(list(weights.items())[: len(weights) // 2]), tensors)
    elif how == "other shapes":
        save_file({name: torch.zeros(3, 3) for name in weights}, tensors)
    elif how == "other modules":
        (adapter / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["c_attn"]}))
    else:
        (adapter / "adapter_config.json").write_text("{")


@pytest.mark.parametrize(
    "how", ["no tensors", "half a file", "half its layers", "other shapes", "other modules", "no config"]
)
def test_an_adapter_that_does_not_fit(folders: tuple[Path, Path], how: str) -> None:
    model, adapter = folders
    adapted_copy(AutoModelForCausalLM.from_pretrained(model), adapter)
    damaged(adapter, how)
    with pytest.raises(ConfigurationError, match="does not fit") as caught:
        adapted_copy(AutoModelForCausalLM.from_pretrained(model), adapter)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("weights", ["int8", "native"])
def test_a_recording_of_a_model_with_other_weights(folders: tuple[Path, Path], weights: str) -> None:
    served = serve_model(load(resolve(str(folders[0]))), weights)  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(folders[0])
    describe(model, served.manifest)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1.0
    with pytest.raises(ConfigurationError, match="up_proj has other weights"):
        describe(model, served.manifest)
