"""Makes tiny random models of each kind that providers serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, PreTrainedModel

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
