"""Tests that attention over rows of many requests equals attention for each request alone, and that unsupported models
are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    PreTrainedModel,
)

from tenant_sdk.serving.attention import kernels
from tenant_sdk.serving.attention.few_rows import RequestRows
from tenant_sdk.serving.kv import RequestKv, kv_layout
from tenant_sdk.serving.ragged import RaggedModel, attend
from tests.support.tiny_models import CONFIGS, KINDS
from wire.errors import ConfigurationError

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def local(config: Any, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()


def first_step(model: PreTrainedModel) -> RaggedModel:
    ragged = RaggedModel(model)
    layout = kv_layout(model, "fp32", 16)
    ragged.forward(
        [RequestRows(RequestKv(layout, 4, CPU), 0, 4)], tokens(4, 0) % 32, torch.arange(4), torch.tensor([3])
    )
    return ragged


def tokens(num: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 100, (num,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_three_requests_give_the_logits_of_each_alone(
    kind: str, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr(kernels, "available", lambda: False)
    reference = local(CONFIGS[kind])
    model = RaggedModel(local(CONFIGS[kind]))
    layout = kv_layout(model.model, "fp32", step_tokens=16)
    texts = [tokens(num, seed) for seed, num in enumerate((20, 9, 14))]
    kvs = [RequestKv(layout, len(text), CPU) for text in texts]
    read, got = [0, 0, 0], [list[torch.Tensor]() for _ in texts]
    for sizes in ((7, 1, 3), (1, 4, 1), (5, 0, 9), (6, 3, 1), (1, 1, 0)):
        parts = [(number, read[number], size) for number, size in enumerate(sizes) if size]
        rows = [RequestRows(kvs[number], start, size) for number, start, size in parts]
        ids = torch.cat([texts[number][start : start + size] for number, start, size in parts])
        positions = torch.cat([torch.arange(start, start + size) for _, start, size in parts])
        logits, is_finite = model.forward(rows, ids, positions, torch.arange(len(ids)))
        assert bool(is_finite.all())
        for (number, _, size), part in zip(parts, logits.split([size for _, _, size in parts]), strict=True):
            got[number].append(part)
            read[number] += size
    assert read == [len(text) for text in texts]
    for text, parts_of in zip(texts, got, strict=True):
        torch.testing.assert_close(torch.cat(parts_of), reference(text[None]).logits[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_padding_is_not_seen_and_its_rows_are_harmless() -> None:
    reference = local(CONFIGS["llama"])
    model = RaggedModel(local(CONFIGS["llama"]))
    layout, text = kv_layout(model.model, "fp32", 16), tokens(5, 1)
    ids, positions = torch.cat([torch.zeros(3, dtype=torch.int64), text]), torch.tensor([0, 0, 0, 0, 1, 2, 3, 4])
    wanted = torch.arange(3, 8)
    logits, is_finite = model.forward([RequestRows(RequestKv(layout, 5, CPU), 0, 8, 3)], ids, positions, wanted)
    torch.testing.assert_close(logits, reference(text[None]).logits[0], rtol=1e-4, atol=1e-5)
    assert bool(is_finite.all())


def test_attention_equals_the_slow_product() -> None:
    query, keys, values = torch.randn(4, 3, 8), torch.randn(2, 7, 8), torch.randn(2, 7, 8)
    mask = torch.arange(7) <= torch.arange(4, 7)[:, None]
    for softcap in (None, 2.0):
        want = torch.zeros(4, 3, 8)
        for head in range(4):
            products = query[head] @ keys[head // 2].T * 0.5
            products = products if softcap is None else softcap * torch.tanh(products / softcap)
            want[head] = torch.softmax(products.masked_fill(~mask, -torch.inf), -1) @ values[head // 2]
        torch.testing.assert_close(attend(query, keys, values, mask, 0.5, softcap), want)


@torch.no_grad()
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_row_whose_query_key_or_value_is_not_finite_stays_so(where: str) -> None:
    model = RaggedModel(local(CONFIGS["llama"]))
    layout = kv_layout(model.model, "fp32", 16)

    def spoil(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[0, 1, 0] = torch.nan
        return output

    model.model.model.layers[0].self_attn.get_submodule(f"{where}_proj").register_forward_hook(spoil)
    parts = [RequestRows(RequestKv(layout, 2, CPU), 0, 2), RequestRows(RequestKv(layout, 2, CPU), 0, 2)]
    _, is_finite = model.forward(parts, tokens(4, 0), torch.tensor([0, 1, 0, 1]), torch.tensor([3]))
    assert is_finite.tolist()[1:] == [False, True, True], "the other request is not touched"


@torch.no_grad()
@pytest.mark.parametrize(
    ("config", "said"),
    [
        (MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1), "does not serve mamba"),
        (BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2), "does not serve bloom"),
        (LlamaConfig(**SMALL, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "rotary"),
        (GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1), "attention takes s_aux|rotary"),
        (Llama4TextConfig(**SMALL, attention_chunk_size=4, num_local_experts=1, intermediate_size_mlp=16), "not serve"),
    ],
    ids=["mamba", "bloom", "dynamic rope", "sinks", "chunks"],
)  # fmt: skip
def test_what_it_cannot_do_is_refused_in_one_line(config: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as refused:
        first_step(local(config))
    assert "\n" not in str(refused.value)


@torch.no_grad()
def test_nothing_of_a_step_is_left_behind() -> None:
    model = first_step(local(CONFIGS["llama"]))
    with pytest.raises(LookupError):
        model.model(input_ids=tokens(2, 0)[None])
