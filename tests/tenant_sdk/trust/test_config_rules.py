"""Tests how an unverified config is read: only keys that its class declares count, values out of range are refused, and
the defaults of every architecture that is served pass."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, LlamaConfig

from tenant_sdk.trust.config_rules import allowed, check_rows_are_padded, read_config
from tests.support.tiny_models import tiny_config
from wire.errors import ConfigurationError, MalformedFrame, VeilbaseError

LLAMA: dict[str, Any] = json.loads(tiny_config("llama").to_json_string(use_diff=False))


def written(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return folder


def text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def test_the_same_config(tmp_path: Path) -> None:
    read, local = read_config(written(tmp_path)).to_dict(), tiny_config("llama").to_dict()
    assert {key for key in local if read[key] != local[key]} <= {"architectures"}


def test_the_defaults_of_every_architecture_pass(tmp_path: Path) -> None:
    """The default config of each served architecture must be read without an error and without a change, because
    otherwise honest providers would be refused."""
    checked = 0
    for config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        if config_class.model_type == "blt":  # refused: its rows depend on contents
            continue
        try:
            config_class().save_pretrained(tmp_path)
            expected = config_class.from_pretrained(tmp_path, local_files_only=True).to_dict()
        except Exception:  # noqa: BLE001, S112 - a few classes have no default instance
            continue
        rebuilt = read_config(tmp_path).to_dict()
        differing = {key for key in expected if text(expected[key]) != text(rebuilt.get(key))}
        assert differing <= {"architectures", "transformers_version", "dtype"}, (config_class.__name__, differing)
        checked += 1
    assert checked > 150


def test_unknown_keys_and_switches_are_dropped(tmp_path: Path) -> None:
    config = read_config(
        written(
            tmp_path, evil="x", output_attentions=True, return_dict=False, chunk_size_feed_forward=7,
            pruned_heads={"0": [1]}, id2label={"0": "x"}, is_encoder_decoder=True,
        )
    )  # fmt: skip
    plain = LlamaConfig()
    assert not hasattr(config, "evil")
    for name in ("output_attentions", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder"):
        assert getattr(config, name) == getattr(plain, name)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_dropout", 1.0), ("attention_dropout", -0.1), ("rms_norm_eps", math.nan), ("rms_norm_eps", math.inf),
        ("hidden_size", 1 << 40), ("initializer_range", 1e30), ("hidden_act", "evil"), ("hidden_act", "a b"),
        ("rope_parameters", {"rope_theta": math.nan}), ("rope_parameters", {"a b": 1}), ("eos_token_id", [1] * 70_000),
        ("rope_parameters", {"a": {"b": {"c": {"d": {"e": {"f": {"g": 1}}}}}}}),
    ],
)  # fmt: skip
def test_values_out_of_range(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(VeilbaseError) as failure:
        read_config(written(tmp_path, **{key: value}))
    assert isinstance(failure.value, MalformedFrame)
    assert "\n" not in str(failure.value)


def test_architectures_whose_rows_depend_on_contents(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="needs a checkpoint that you trust") as failure:
        read_config(written(tmp_path, model_type="blt"))
    assert "\n" not in str(failure.value)
    check_rows_are_padded(["model.layers.0.mlp.up_proj"], "llama")
    with pytest.raises(ConfigurationError, match="experts"):
        check_rows_are_padded(["model.layers.0.mlp.up_proj", "model.layers.0.mlp.experts.3.up_proj"], "llama")
    with pytest.raises(ConfigurationError, match="cannot hide how a blt model cuts"):
        check_rows_are_padded(["model.layers.0.mlp.up_proj"], "blt")


@pytest.mark.parametrize("kind", ["evil", "../x", None, 7, ["llama"]])
def test_unknown_architectures(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot build"):
        read_config(written(tmp_path, model_type=kind))


def test_a_nested_config() -> None:
    config_class = CONFIG_MAPPING["gemma3"]
    content = json.loads(config_class().to_json_string(use_diff=False))
    content["text_config"]["evil"] = 1
    assert "evil" not in allowed(content, config_class)["text_config"]
    content["text_config"]["attention_dropout"] = 5.0
    with pytest.raises(MalformedFrame, match="probability below 1 as attention_dropout"):
        allowed(content, config_class)
