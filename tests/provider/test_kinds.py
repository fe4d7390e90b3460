"""Tests kinds of models: which are refused, and what a mixture of experts hides from the provider."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    MambaConfig,
    MixtralConfig,
    PreTrainedConfig,
    RwkvConfig,
    T5Config,
    ViTConfig,
)

from provider.model.load import load, resolve
from provider.model.trace import base_layers, trace_groups
from provider.model.weights import other_weights_share, serve_model
from tests.support.tiny_models import SIZES, VOCAB, make_tiny
from wire.errors import ConfigurationError

RWKV: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 3, "rescale_every": 1,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {**SIZES, "num_local_experts": 4}


@pytest.mark.parametrize("config", [T5Config(), ViTConfig(), BartConfig()], ids=lambda config: config.model_type)
def test_other_models_than_causal_ones_are_refused_in_one_sentence(config: PreTrainedConfig, tmp_path: Path) -> None:
    """Encoders, image models and encoder-decoder models are refused. Without this check, transformers would load only
    the decoder of BART."""
    config.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigurationError) as raised:
        load(resolve(str(tmp_path / "other")))
    assert str(raised.value) == (
        f"cannot serve the model 'other' of type '{config.model_type}': "
        "choose a causal language model (one that AutoModelForCausalLM loads)"
    )


def test_stacked_experts_are_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    AutoModelForCausalLM.from_config(MixtralConfig(**MIXTRAL)).save_pretrained(tmp_path / "mixtral")
    with caplog.at_level(logging.WARNING, "provider.model.weights"):
        serve_model(load(resolve(str(tmp_path / "mixtral"))))
    (record,) = [record for record in caplog.records if record.name == "provider.model.weights"]
    assert record.getMessage().startswith("77% of the parameters, such as stacked experts, are in no")


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma"])
def test_other_models_have_nothing_to_announce(kind: str, tmp_path: Path) -> None:
    assert other_weights_share(make_tiny(kind, tmp_path)) == 0


def test_a_recurrent_model_has_too_little_to_announce() -> None:
    mamba = MambaConfig(vocab_size=VOCAB, hidden_size=256, num_hidden_layers=2)
    for config in (mamba, RwkvConfig(**RWKV)):
        assert other_weights_share(AutoModelForCausalLM.from_config(config)) < 0.05


def test_weights_that_the_model_changes_are_put_back_and_not_served() -> None:
    """RWKV divides weights in place before its first forward pass. The tenant's model does so, too, so the bundle must
    have the originals."""
    model = AutoModelForCausalLM.from_config(RwkvConfig(**RWKV)).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layers = base_layers(model)
    served = {name for group in trace_groups(model, layers) for name in group}
    assert set(layers) - served == {
        f"rwkv.blocks.{block}.{name}" for block in range(3) for name in ("attention.output", "feed_forward.value")
    }
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
