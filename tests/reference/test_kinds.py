"""Tests that architectures whose layers are called differently from Llama's give the same results as local
transformers + PEFT."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from transformers import (
    FalconConfig,
    JambaConfig,
    MambaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    RwkvConfig,
)

from tenant_sdk import TenantClient
from tenant_sdk.model.remote_linear import RemoteLinear
from tests.support.parity import RELATIVE, adapted, batch, local, relative
from tests.support.tiny_models import SIZES, save_random

SMALL: dict[str, Any] = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id")}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, **SIZES}
CONFIGS: dict[str, PreTrainedConfig] = {
    "falcon": FalconConfig(**SMALL, num_hidden_layers=2, num_attention_heads=4, bias=True),
    "mamba": MambaConfig(**SMALL, state_size=4, num_hidden_layers=2, pad_token_id=0),
    "rwkv": RwkvConfig(
        **SMALL, attention_hidden_size=32, intermediate_size=64, num_hidden_layers=3, rescale_every=1, context_length=64
    ),
    "mixtral": MixtralConfig(**EXPERTS, num_local_experts=4),
    "jamba": JambaConfig(
        **EXPERTS, num_experts=2, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4,
    ),
}  # fmt: skip
SERVED = {  # the last parts of layer names; LoRA changes each layer for which PEFT allows it
    "falcon": {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
    "mamba": {"in_proj", "x_proj", "out_proj"},
    "rwkv": {"key", "value", "receptance", "head"},
    "mixtral": {"q_proj", "k_proj", "v_proj", "o_proj", "lm_head"},
    "jamba": {
        *("in_proj", "x_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "lm_head"),
        *("gate_proj", "up_proj", "down_proj"),
    },
}
NOT_ADAPTED = {"lm_head", "head", "out_proj"}


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Provides (kind, folder, client) with native weights and float arithmetic, without a mask."""
    kind: str = request.param
    folder = tmp_path_factory.mktemp(kind)
    save_random(CONFIGS[kind], folder)
    with TenantClient(
        f"inproc:{folder}", weights="native", mask="off", arithmetic="float", cache=folder / "cache"
    ) as client:
        yield kind, folder, client


def lora(kind: str) -> LoraConfig:
    targets = sorted(SERVED[kind] - NOT_ADAPTED)
    return LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")


def logits(model: Any) -> torch.Tensor:
    # RWKV changes its state in place, so that gradients through the state fail on both sides.
    return model(batch(), use_cache=False).logits  # type: ignore[no-any-return]


def grads(model: Any) -> dict[str, torch.Tensor]:
    torch.nn.functional.cross_entropy(logits(model).flatten(0, 1), batch().flatten()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_which_layers_are_served(pair: Any) -> None:
    kind, _, client = pair
    model = client.load_model()
    remote = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, RemoteLinear)}
    assert remote == SERVED[kind]


def test_logits(pair: Any) -> None:
    _, folder, client = pair
    with torch.no_grad():
        assert relative(logits(client.load_model()), logits(local(folder))) < RELATIVE


@pytest.mark.parametrize("training", [False, True])
def test_lora_gradients(pair: Any, training: bool) -> None:
    kind, folder, client = pair
    ours, theirs = (adapted(model, lora(kind)).train(training) for model in (client.load_model(), local(folder)))
    got, want = grads(ours), grads(theirs)
    assert got.keys() == want.keys()
    assert len(want) >= 8
    for name, gradient in want.items():
        assert relative(got[name], gradient) < RELATIVE, name


def test_greedy_tokens(pair: Any) -> None:
    kind, folder, client = pair
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompt = batch()[:1, :5]
    models = (adapted(client.load_model(), lora(kind)), adapted(local(folder), lora(kind)))
    ours, theirs = (model.generate(input_ids=prompt, **options) for model in models)
    assert ours.shape[1] == 11
    assert torch.equal(ours, theirs)


def test_nothing_says_quantized_and_lora_is_the_plain_one(pair: Any) -> None:
    """With the mark of a quantizer in their config, Jamba and others would compute differently from the local model."""
    kind, _, client = pair
    model = client.load_model()
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    assert not any(hasattr(module.config, "_is_quantized") for module in parts)
    adapters = [module for module in adapted(model, lora(kind)).modules() if hasattr(module, "lora_A")]
    assert {type(module) for module in adapters} == {LoraLinear}
