"""Provides configs of tiny models for tests of training in windows of tokens, and batches whose rows differ in length
and in labels."""

from __future__ import annotations

from typing import Any

import torch
from transformers import OPTConfig

from tests.support import served_kinds
from tests.support.tiny_models import VOCAB

CONFIGS: dict[str, Any] = {
    **{kind: served_kinds.CONFIGS[kind] for kind in ("llama", "qwen3", "gemma3", "gpt2")},
    "opt": OPTConfig(
        vocab_size=VOCAB, hidden_size=32, word_embed_proj_dim=16, ffn_dim=64, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=128, dropout=0.0, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, init_std=0.2,
    ),
}  # fmt: skip
"""A config of each kind of model. Gemma 3 has layers with a sliding window of 6 tokens, and OPT has a projection before
its head."""
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
