"""Tests the settings of LoRA adapters: those that the store supports have the same effect as in PEFT, and all others
are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from peft import LoraConfig
from peft.utils.other import get_pattern_key

from tenant_sdk.serving.adapters.peft_settings import LoraSettings, read_settings, served_settings
from tenant_sdk.serving.adapters.targets import Base
from wire.errors import ConfigurationError

BASE = Base(("SmolLM2-135M-Instruct", "acme/own-name"), {})


def parse(base: Base = BASE, **changes: Any) -> LoraSettings:
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"], task_type="CAUSAL_LM").to_dict() | changes
    content = json.dumps(config, default=lambda value: list(value) if isinstance(value, set) else str(value))
    return served_settings("some", read_settings("some", content.encode(), base), base)


def test_what_peft_writes_today_is_accepted() -> None:
    settings = parse()
    assert (settings.rank_of("model.layers.0.q_proj"), settings.scaling_of("x")) == (8, 2.0)


def test_rslora_divides_by_the_root() -> None:
    assert parse(use_rslora=True, r=16).scaling_of("x") == 4.0


def test_patterns_match_as_in_peft() -> None:
    ranks = {
        "q_proj": 4,
        r"layers\.1\.k_proj": 5,
        "model.layers.2.v_proj": 6,
        r".*o_proj": 7,
        "layers.[34].q": 9,
        r"layers\.(?:6|7)\..*": 3,
        "(h|model.layers.8).q": 2,
    }
    settings = parse(rank_pattern=ranks, alpha_pattern={"k_proj": 40})
    for module in (
        "model.layers.0.q_proj", "model.layers.1.k_proj", "model.layers.11.k_proj", "model.layers.2.v_proj",
        "model.layers.2.v_proj.x", "a.b.o_proj", "xq_proj", "model.layers.3.q", "model.layers.5.q", "model.layers.6.q",
        "model.layers.7.q", "model.layers.8.q", "model.layers.9.q",
    ):  # fmt: skip
        rank = ranks.get(get_pattern_key(list(ranks), module), 8)
        assert settings.rank_of(module) == rank
        assert settings.scaling_of(module) == (40 if module.endswith(".k_proj") else 16) / rank


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"peft_type": "OSF"}, "kind 'OSF', which is not served"),
        ({"peft_type": "PROMPT_TUNING"}, "kind 'PROMPT_TUNING'"),
        ({"peft_type": ["LORA"]}, "kind"),
        ({"peft_type": None}, "kind None"),
        ({"use_dora": 1}, "use_dora that is neither"),
        ({"alora_invocation_tokens": [5]}, "kind aLoRA"),
        ({"use_qalora": True}, "kind QALoRA"),
        ({"modules_to_save": ["lm_head"]}, "sets 'modules_to_save'"),
        ({"trainable_token_indices": [1]}, "sets 'trainable_token_indices'"),
        ({"layer_replication": [[0, 1]]}, "sets 'layer_replication'"),
        ({"target_parameters": ["experts"]}, "sets 'target_parameters'"),
        ({"lora_bias": 1}, "has 1 for 'lora_bias'"),
        ({"lora_bias": True, "init_lora_weights": "pissa"}, "was started by 'pissa'"),
        ({"lora_bias": True, "use_dora": True}, "sets 'use_dora'"),
        ({"something_new": 1}, "sets 'something_new'"),
        ({"use_rslora": 1}, "use_rslora that is neither"),
        ({"bias": "all"}, "trains biases"),
        ({"init_lora_weights": "pissa"}, "'pissa', which changes base weights"),
        ({"init_lora_weights": "olora"}, "'olora', which changes base weights"),
        ({"r": 0}, "the rank 0"),
        ({"r": True}, "the rank True"),
        ({"r": 1 << 40}, "the rank 1099511627776"),
        ({"rank_pattern": {"q_proj": -1}}, "the rank -1"),
        ({"rank_pattern": [1]}, "rank_pattern that is no table"),
        ({"rank_pattern": {f"p{at}": 4 for at in range(5000)}}, "rank_pattern that is no table"),
        ({"rank_pattern": {"(a+)+(b+)": 4}}, "too intricate"),
        ({"rank_pattern": {"(.+)+!": 4}}, "too intricate"),
        ({"rank_pattern": {"(?:.+){9}!": 4}}, "too intricate"),
        ({"rank_pattern": {"(|)" * 80 + "!": 4}}, "too intricate"),
        ({"rank_pattern": {r"(.|\w)" * 40 + "!": 4}}, "too intricate"),
        ({"rank_pattern": {"(" + "|" * 200 + ")": 4}}, "too intricate"),
        ({"rank_pattern": {"(?i:[\0-\U0010ffff])": 4}}, "too intricate"),
        ({"rank_pattern": {r"[\u0100-\U0010ffff]": 4}}, "too intricate"),
        ({"rank_pattern": {"[\u0100-\U0010ffff]": 4}}, "too intricate"),
        ({"rank_pattern": {f"{at}.*": 4 for at in range(17)}}, "more than 16 intricate patterns"),
        ({"rank_pattern": {"(": 4}}, "too intricate"),
        ({"alpha_pattern": {"q" * 300: 4}}, "too intricate"),
        ({"lora_alpha": float("nan")}, "the alpha nan"),
        ({"lora_alpha": float("inf")}, "the alpha inf"),
        ({"lora_alpha": 1e30}, "the alpha 1e"),
        ({"lora_alpha": "16"}, "the alpha '16'"),
        ({"alpha_pattern": {"q_proj": None}}, "the alpha None"),
    ],
)
def test_refused_in_one_line(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match) as caught:
        parse(**changes)
    assert "\n" not in str(caught.value)


def test_settings_that_are_deep() -> None:
    def nested(levels: int) -> bytes:  # the object itself is the first level
        return b'{"x": ' + b"[" * (levels - 1) + b"7" + b"]" * (levels - 1) + b"}"

    with pytest.raises(ConfigurationError, match="settings of more than 16 levels") as caught:
        read_settings("some", nested(17), BASE)
    assert "\n" not in str(caught.value)
    assert read_settings("some", nested(16), BASE)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b"[" * 100_000, b"nope", '{"r": 8}'.encode("utf-16")])
def test_settings_that_are_no_object(content: bytes) -> None:
    with pytest.raises(ConfigurationError, match="no JSON object"):
        read_settings("some", content, BASE)


@pytest.mark.parametrize(
    "name",
    [
        "SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m", "acme/own-name", None, "",
        "/data/some/folder", "./folder", "~/folder", "C:\\models\\x",
    ],
)  # fmt: skip
def test_names_of_the_same_base(name: str | None) -> None:
    assert parse(base_model_name_or_path=name).rank == 8


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.2-1B", "gpt2", "HuggingFaceTB/SmolLM2-360M"])
def test_names_of_another_base(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"was trained on .* and this model is 'SmolLM2-135M-Instruct'"):
        parse(base_model_name_or_path=name)


def test_a_model_without_a_name_takes_all_that_fit() -> None:
    assert parse(Base(("",), {}), base_model_name_or_path="meta-llama/Llama-3.2-1B").rank == 8
