"""Tests which adapters are refused, and that nothing is sent for one that cannot be trained. Also tests that adapters
of remote layers can be unloaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import (
    FrodConfig,
    IA3Config,
    LoraConfig,
    MissConfig,
    OSFConfig,
    PsoftConfig,
    SupertuningConfig,
    get_peft_model,
)
from peft.tuners.lora.config import KasaConfig
from transformers import AutoModelForCausalLM

from tenant_sdk import TenantClient
from tenant_sdk.kinds.refused import check_trainable
from tenant_sdk.model.remote_linear import RemoteWeightError
from tests.support.parity import batch
from tests.support.spies import before_requests
from tests.support.training import QUICK, ROWS, lora
from wire.errors import ConfigurationError

TARGETS: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
REFUSED: dict[str, tuple[Any, str]] = {
    "exact PiSSA": (LoraConfig(init_lora_weights="pissa", **TARGETS), "use 'pissa_niter_8'"),
    "LoRA-GA": (LoraConfig(init_lora_weights="lora_ga", **TARGETS), "use 'pissa_niter_8'"),
    "MiCA": (LoraConfig(init_lora_weights="mica", **TARGETS), "use 'olora'"),
    "KaSA": (LoraConfig(kasa_config=KasaConfig(), **TARGETS), "use LoRA with 'pissa_niter_8'"),
    "DoRA from OLoRA": (LoraConfig(use_dora=True, init_lora_weights="olora", **TARGETS), "use_dora=False"),
    "DoRA from PiSSA": (LoraConfig(use_dora=True, init_lora_weights="pissa_niter_4", **TARGETS), "use True"),
    "DoRA from random numbers": (LoraConfig(use_dora=True, init_lora_weights=False, **TARGETS), "use True"),
    "orthogonal DoRA": (LoraConfig(r=4, use_dora=True, init_lora_weights="orthogonal", **TARGETS), "use True"),
    "FRoD": (FrodConfig(**TARGETS), "use VeRA"),
    "OSF": (OSFConfig(**TARGETS), "use LoRA"),
    "MiSS, bat": (MissConfig(r=4, init_weights="bat", **TARGETS), "'mini'"),
    "PSOFT": (PsoftConfig(r=4, **TARGETS), "use 'lowrank'"),
    "Super-Tuning": (SupertuningConfig(**TARGETS), "use SHiRA"),
    "LoftQ": (SimpleNamespace(peft_type="LORA", use_dora=False, init_lora_weights="loftq"), "init_lora_weights=True"),
    "CorDA": (LoraConfig(init_lora_weights="corda", **TARGETS), "use 'pissa_niter_8'"),
    "AdaMSS": (SimpleNamespace(peft_type="ADAMSS"), "use TinyLoRA"),
}


@pytest.mark.parametrize("title", REFUSED)
def test_what_needs_the_weight_itself_is_refused_in_one_sentence(
    title: str, chat_client: TenantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, remedy = REFUSED[title]
    sent: list[Any] = []
    before_requests(monkeypatch, lambda *call: sent.append(call))
    if isinstance(config, SimpleNamespace):  # PEFT makes this config only with a package that is not installed
        refused = check_trainable
    else:
        refused = lambda config: chat_client.finetune(ROWS, config, tmp_path / "out", **QUICK)  # noqa: E731
    with pytest.raises(ConfigurationError) as caught:
        refused(config)
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sent == []


def test_stock_peft_gets_an_error_too(chat_client: TenantClient) -> None:
    with pytest.raises(ConfigurationError, match="use SHiRA"):
        get_peft_model(chat_client.load_model(), SupertuningConfig(**TARGETS))
    with pytest.raises(RemoteWeightError):
        get_peft_model(chat_client.load_model(), OSFConfig(**TARGETS))


@pytest.mark.parametrize(
    ("start", "match"), [("pissa", "changes base weights"), ("pissa_niter_4", "changes base weights")]
)
def test_generate_refuses_adapters_of_a_changed_base(
    start: str, match: str, chat_client: TenantClient, chat_folder: Path, tmp_path: Path
) -> None:
    config = LoraConfig(r=4, init_lora_weights=start, **TARGETS)
    get_peft_model(AutoModelForCausalLM.from_pretrained(chat_folder), config).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=match):
        chat_client.generate("who?", adapter=tmp_path, max_new_tokens=2)


def test_generate_and_the_engine_refuse_an_adapter_of_another_model(
    chat_client: TenantClient, chat_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    get_peft_model(AutoModelForCausalLM.from_pretrained(chat_folder), lora()).save_pretrained(folder)
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": "acme/elsewhere"}))
    match = "was trained on 'acme/elsewhere', and this model is"
    with pytest.raises(ConfigurationError, match=match):
        chat_client.generate("who?", adapter=folder, max_new_tokens=2)
    with pytest.raises(ConfigurationError, match=match):
        chat_client.generate_many(["who?"], adapters=folder, max_new_tokens=2, progress=False)


@pytest.mark.parametrize(
    "config", [lora(), IA3Config(feedforward_modules=["down_proj"], **TARGETS)], ids=["lora", "ia3"]
)
def test_an_adapter_can_be_unloaded(config: Any, chat_client: TenantClient) -> None:
    model = chat_client.load_model()
    with torch.no_grad():
        plain = model(batch()).logits
        adapted = get_peft_model(model, config)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
        assert not torch.equal(adapted(batch()).logits, plain)
        assert torch.equal(adapted.unload()(batch()).logits, plain)


def test_no_other_weight_takes_the_place_of_a_remote_one(chat_client: TenantClient) -> None:
    layer: Any = chat_client.load_model().get_submodule("model.layers.0.mlp.down_proj")
    with pytest.raises(RemoteWeightError, match="no other can take its place"):
        layer.weight = torch.zeros(tuple(layer.weight.shape))
