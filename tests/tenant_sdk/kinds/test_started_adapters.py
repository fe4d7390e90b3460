"""Tests adapters that start from base weights: how they are saved, resumed and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PsoftConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tenant_sdk import TenantClient
from tenant_sdk.training.checkpoints import checkpoints_folder
from tests.support.parity import RELATIVE, batch, relative
from tests.support.spies import before_requests
from tests.support.training import QUICK, ROWS
from wire.errors import ConfigurationError, Unavailable

TARGETS = ["q_proj", "down_proj"]


def config(start: str = "pissa_niter_4", **changes: Any) -> LoraConfig:
    own = {"r": 4, "lora_alpha": 6, "target_modules": TARGETS, "task_type": "CAUSAL_LM", "init_lora_weights": start}
    return LoraConfig(**{**own, **changes})


def psoft() -> PsoftConfig:
    return PsoftConfig(r=4, psoft_alpha=6, target_modules=TARGETS, task_type="CAUSAL_LM", psoft_svd="lowrank")


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(batch()).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "made",
    [
        config(), config("olora"), config(use_rslora=True),
        config(rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 5, "down_proj": 3}),
    ],
    ids=["pissa", "olora", "rslora", "patterns"],
)  # fmt: skip
def test_a_started_adapter_is_saved_as_lora_of_twice_the_rank(
    made: LoraConfig, chat_client: TenantClient, chat_folder: Path, tmp_path: Path
) -> None:
    model = get_peft_model(chat_client.load_model(), made)
    plain = logits(chat_client.load_model())
    assert relative(logits(model), plain) < RELATIVE  # at first the adapter changes nothing
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.05)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (settings["peft_type"], settings["init_lora_weights"], settings["r"]) == ("LORA", True, 8)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert {name.rsplit(".", 2)[1] for name in saved} == {"lora_A", "lora_B"}
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(chat_folder), str(tmp_path))
    assert relative(logits(model), plain) > 1e-3
    assert relative(logits(model), logits(theirs)) < RELATIVE
    with pytest.raises(ConfigurationError, match="plain LoRA already"):
        model.save_pretrained(tmp_path, path_initial_model_for_weight_conversion=str(tmp_path))


def test_psoft_is_saved_as_lora(chat_client: TenantClient, chat_folder: Path, tmp_path: Path) -> None:
    model = get_peft_model(chat_client.load_model(), psoft())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.05)
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(chat_folder), str(tmp_path))
    assert relative(logits(model), logits(chat_client.load_model())) > 1e-3
    assert relative(logits(model), logits(theirs)) < RELATIVE


def interrupted(client: TenantClient, made: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a fine-tuning whose provider goes away after the first checkpoint."""
    checkpoint = checkpoints_folder(folder) / "checkpoint-2"

    def fail(*_: Any) -> None:
        if (checkpoint / "trainer_state.json").exists():
            raise Unavailable("the provider went away")

    with monkeypatch.context() as broken:
        before_requests(broken, fail)
        with pytest.raises(Unavailable):
            client.finetune(ROWS, made, folder, resume=False, **QUICK)


def test_a_run_is_resumed_with_the_same_start(
    chat_client: TenantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = chat_client.finetune(ROWS, config(), tmp_path / "whole", **QUICK)
    interrupted(chat_client, config(), tmp_path / "cut", monkeypatch)
    resumed = chat_client.finetune(ROWS, config(), tmp_path / "cut", **QUICK)
    assert resumed.resumed_from_step > 0
    one, other = (load_file(each.adapter_dir / "adapter_model.safetensors") for each in (whole, resumed))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert relative(other[name], tensor) < 1e-3, name


def test_a_psoft_run_says_that_it_cannot_be_resumed(
    chat_client: TenantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(chat_client, psoft(), tmp_path / "cut", monkeypatch)
    with pytest.raises(ConfigurationError, match="cannot be resumed: pass resume=False"):
        chat_client.finetune(ROWS, psoft(), tmp_path / "cut", **QUICK)
