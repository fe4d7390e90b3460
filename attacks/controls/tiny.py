"""Makes a tiny random model and its manifest, for controls whose traffic needs real layers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from attacks.seen.public_model import PublicModel, describe
from wire.manifest import Manifest

HIDDEN = 32


@functools.cache
def tiny_model(kind: str = "llama") -> Any:
    """Returns a random transformers model on the CPU, with 2 blocks, hidden size 32 and a vocabulary of 64 tokens.

    The standard deviation of its weights is 0.15, not transformers' 0.02, so that adapters and attention have visible
    effects. Every call with the same `kind` returns the same object, so callers must not change it.

    Args:
        kind: `llama`; any other text gives a GPT-2 model.
    """
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    torch.manual_seed(0)
    if kind == "llama":
        config: Any = LlamaConfig(
            vocab_size=64, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.15,
        )  # fmt: skip
    else:
        config = GPT2Config(
            vocab_size=64, n_embd=HIDDEN, n_inner=48, n_layer=2, n_head=4, n_positions=256, initializer_range=0.15,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name or "ln_" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def tiny_manifest(kind: str, weights: str, folder: Path) -> Manifest:
    """Saves the model of `tiny_model` in `folder`, and returns the manifest that a provider of the model announces.

    Args:
        kind: the kind of model, as in `tiny_model`.
        weights: `native` for the model's own weights; any other text gives int8.
        folder: the folder to save to; it is made if it is missing.
    """
    from provider.model.load import load, resolve
    from provider.model.weights import serve_model

    tiny_model(kind).save_pretrained(folder)
    return serve_model(load(resolve(str(folder))), "native" if weights == "native" else "int8").manifest


def tiny_public(kind: str, manifest: Manifest) -> PublicModel:
    """Returns what adversaries know of the model of `tiny_model`: its public weights and structure."""
    return describe(tiny_model(kind), manifest)
