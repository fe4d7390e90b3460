"""Makes tiny models of every kind that the engine serves, whose logits differ enough for tokens to be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from tenant_sdk import TenantClient
from tenant_sdk.testing import character_tokenizer
from tests.support.mask_parameters import TOY_OPTIONS
from tests.support.tiny_models import GPT2_SIZES, SIZES, save_random

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
    if mask == "lattice":
        own["mask_options"] = {**TOY_OPTIONS, "hints": "stream", "background": False}
    return TenantClient(f"inproc:{folder}", **{**own, **options})
