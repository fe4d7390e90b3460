"""Makes tiny random models of each kind that is served, with a tokenizer where needed, and batches for training in
windows of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tenant_sdk import TenantClient
from tenant_sdk.testing import CHAT_TEMPLATE, character_tokenizer
from tests.support.lattice import TOY_OPTIONS

VOCAB = 128
"""The number of tokens in the vocabulary of every tiny model."""


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
"""The settings of tiny models, under the names that most kinds of models use."""
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": 1,
    "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
"""The same settings under the names that GPT-2 uses."""


def tiny_config(kind: str) -> Any:
    """Returns a config with two layers and a hidden size of 32.

    The config of gemma also has another head size, soft-capping and scaled embeddings.
    """
    if kind == "llama":
        return LlamaConfig(**SIZES, tie_word_embeddings=False)
    if kind == "gpt2":
        return GPT2Config(**GPT2_SIZES)
    return Gemma2Config(**SIZES, head_dim=16)


def save_random(config: Any, folder: Path, seed: int = 0) -> None:
    """Saves a random model to `folder`. Its biases are random, too, so that a forgotten bias shows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)


def make_tiny(kind: str, folder: Path, seed: int = 0) -> PreTrainedModel:
    """Saves a random model of `tiny_config` to `folder`, and returns the model as loaded from there."""
    save_random(tiny_config(kind), folder, seed)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def make_chat_model(
    folder: Path, kind: str = "llama", template: str | dict[str, str] | None = CHAT_TEMPLATE, seed: int = 0
) -> Path:
    """Saves a random model with its tokenizer to `folder`, and returns `folder`."""
    make_tiny(kind, folder, seed)
    character_tokenizer(template).save_pretrained(folder)
    return folder


_COMMON: dict[str, Any] = {**SIZES, "initializer_range": 0.2}
WINDOW = 6
"""The number of tokens in a sliding window. It is smaller than most prompts of the tests, so that the window has an
effect."""
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**_COMMON, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**_COMMON, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_COMMON, head_dim=16, tie_word_embeddings=True),
    "gemma2": Gemma2Config(**_COMMON, head_dim=16, sliding_window=WINDOW, attn_logit_softcapping=5.0),
    "gemma3": Gemma3TextConfig(
        **{**_COMMON, "num_hidden_layers": 3}, head_dim=16, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gpt2": GPT2Config(**GPT2_SIZES, initializer_range=0.2),
    "mistral": MistralConfig(**_COMMON, sliding_window=WINDOW),
}  # fmt: skip
"""The config of each kind of model."""
KINDS = tuple(CONFIGS)
"""The names of the kinds."""
PROMPTS = (
    "who?", "where is it, and since when, and for how much longer?", "b", "what did they say about the copper owl?",
    "why so?", "count: one two three four five six seven eight nine ten",
)  # fmt: skip
"""Prompts of different lengths."""


def make_model(kind: str, folder: Path, seed: int = 0) -> Path:
    """Saves a random model of a kind with a tokenizer to `folder`, and returns `folder`."""
    save_random(CONFIGS[kind], folder, seed)
    character_tokenizer().save_pretrained(folder)
    return folder


def open_client(folder: Path, mask: str = "off", **options: Any) -> TenantClient:
    """Returns a client of a provider in this process. By default it uses float arithmetic without a mask, so that
    results equal local ones."""
    own: dict[str, Any] = {"mask": mask, "cache": folder.with_name(f"{folder.name}-cache"), "progress": False}
    if mask == "off" and "arithmetic" not in options:
        own |= {"weights": "native", "arithmetic": "float"}
    if mask in ("pad", "shares"):
        own["mask_options"] = {"precision": "exact"}  # as in TOY_OPTIONS
    if mask == "lattice":
        own["mask_options"] = {**TOY_OPTIONS, "hints": "stream", "background": False}
    return TenantClient(f"inproc:{folder}", **{**own, **options})


WINDOWED_CONFIGS: dict[str, Any] = {
    **{kind: CONFIGS[kind] for kind in ("llama", "qwen3", "gemma3", "gpt2")},
    "opt": OPTConfig(
        vocab_size=VOCAB, hidden_size=32, word_embed_proj_dim=16, ffn_dim=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=128, dropout=0.0, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, init_std=0.2,
    ),
}  # fmt: skip
"""A config of each kind of model that is trained in windows. Gemma 3 has layers with a sliding window of 6 tokens, and
OPT has a projection before its head."""
NUM_TOKENS = 23
"""The number of tokens in the longer row of `padded_batch`. It is not a multiple of any window length in the tests."""


def padded_batch() -> dict[str, torch.Tensor]:
    """Returns a batch of two rows, with 23 and 10 tokens. The second half of each row has labels, except for the last
    two tokens of the longer row."""
    ids = torch.randint(3, VOCAB, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(1))
    attention_mask, labels = torch.ones_like(ids), torch.full_like(ids, -100)
    ids[1, 10:], attention_mask[1, 10:] = 0, 0
    labels[0, 15:-2], labels[1, 6:10] = ids[0, 15:-2], ids[1, 6:10]
    return {"input_ids": ids, "attention_mask": attention_mask, "labels": labels}


def whole_gradients(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Returns (the loss, the gradients by the parameter's name) of one pass over the whole batch."""
    from tenant_sdk.training.trainers import completion_loss

    model.zero_grad()
    loss, _ = completion_loss(model, dict(inputs))
    loss.backward()
    return float(loss), gradients_of(model)


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """Returns copies of the gradients that a model's parameters have, by the parameter's name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
