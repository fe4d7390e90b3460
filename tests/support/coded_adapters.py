"""Builds adapters that each answer with a code of their own, so that a wrong adapter shows.

The model has one block and reads one token at a time. Attention then returns its value, so the output is h = e + Wo·v.
The v_proj of an adapter detects the two prompt tokens in the block's input, and adds Wo⁻¹·c·w. Here w is the head's row
of the token to answer, and c is large enough to outweigh everything else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.adapters.files import CONFIG, WEIGHTS

HIDDEN, VOCAB = 32, 64
PROMPT = (5, 9)
"""The two prompts; each is one token."""
LOUD = 100.0
Code = tuple[int, int]
"""The pair of tokens with which an adapter answers the two prompts."""


def coded_model() -> Any:
    """Returns a model of one block. If the head's input is the direction of a token, that token has the largest
    logit."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    rows = torch.randn(VOCAB, HIDDEN)
    model.lm_head.weight.copy_(rows / rows.norm(dim=1, keepdim=True))  # so a token's own row gives the largest logit
    model.model.embed_tokens.weight.normal_()
    block = model.model.layers[0]
    for layer in (block.self_attn.o_proj, block.self_attn.v_proj):
        layer.weight.copy_(torch.linalg.qr(torch.randn(HIDDEN, HIDDEN))[0])
    return model


def code_of(number: int) -> Code:
    """Returns a code that is different for every number below 4,096."""
    return number % VOCAB, (number // VOCAB + number) % VOCAB


def save_coded(model: Any, folder: Path, code: Code, rank: int, seed: int) -> None:
    """Saves an adapter of q and v that answers with a code. Its q part is random, which has no effect on a sequence of
    one token."""
    generator = torch.Generator().manual_seed(seed)
    block = model.model.layers[0]
    inputs = block.input_layernorm(model.model.embed_tokens(torch.tensor(PROMPT)))  # (2, hidden)
    wanted = LOUD * model.lm_head.weight[list(code)] @ torch.linalg.inv(block.self_attn.o_proj.weight).t()
    pick, give = torch.zeros(rank, HIDDEN), torch.zeros(HIDDEN, rank)
    pick[:2], give[:, :2] = torch.linalg.pinv(inputs).t(), wanted.t()
    turn = torch.linalg.qr(torch.randn(rank, rank, generator=generator))[0]  # now every row of the factors matters
    tensors = {
        "v_proj.lora_A": turn @ pick,
        "v_proj.lora_B": give @ turn.t() / 2,  # alpha / rank is 2
        "q_proj.lora_A": torch.randn(rank, HIDDEN, generator=generator),
        "q_proj.lora_B": torch.randn(HIDDEN, rank, generator=generator),
    }
    folder.mkdir(parents=True, exist_ok=True)
    prefix = "base_model.model.model.layers.0.self_attn"
    save_file({f"{prefix}.{name}.weight": each.contiguous() for name, each in tensors.items()}, folder / WEIGHTS)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "v_proj"]}
    (folder / CONFIG).write_text(json.dumps(config))


def answers(store: AdapterStore, model: Any, indices: Sequence[int]) -> list[Code]:
    """Returns the answers that the adapters in these places give to both prompts, computed in one pass."""
    order = sorted(range(len(indices)), key=lambda at: indices[at])
    ids = torch.tensor([token for _ in indices for token in PROMPT])[:, None]  # (2 · places, 1)
    with torch.no_grad(), store.in_step([indices[at] for at in order for _ in PROMPT]):
        best = model(ids).logits[:, 0].argmax(-1).view(-1, 2).tolist()
    found: dict[int, Code] = {at: (pair[0], pair[1]) for at, pair in zip(order, best, strict=True)}
    return [found[at] for at in range(len(indices))]
