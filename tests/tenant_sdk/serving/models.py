"""Tiny models of every kind that the engine serves, large enough apart in their logits that tokens can be compared."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    Qwen2Config,
    Qwen3Config,
)

from noise.params import LatticeParameters
from tenant_sdk import TenantClient
from tenant_sdk.serving.engine import Engine
from tests.conftest import VOCAB
from tests.tenant_sdk import tiny

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.2,
}  # fmt: skip
WINDOW = 6
"""Tokens of a sliding window: less than most prompts of these tests, so that it matters."""
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**_COMMON, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**_COMMON, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_COMMON, head_dim=16, tie_word_embeddings=True),
    "gemma2": Gemma2Config(**_COMMON, head_dim=16, sliding_window=WINDOW, attn_logit_softcapping=5.0),
    "gemma3": Gemma3TextConfig(
        **{**_COMMON, "num_hidden_layers": 3}, head_dim=16, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gpt2": GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.2,
    ),
    "mistral": MistralConfig(**_COMMON, sliding_window=WINDOW),
}  # fmt: skip
KINDS = tuple(CONFIGS)
TOY = {
    "parameters": LatticeParameters("toy", 16, 2, 3.2, 0, "a test", toy=True), "allow_toy": True, "hints": "stream",
    "background": False,
}  # fmt: skip
PROMPTS = (
    "who?", "where is it, and since when, and for how much longer?", "b", "what did they say about the copper owl?",
    "why so?", "count: one two three four five six seven eight nine ten",
)  # fmt: skip


def make_model(kind: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random model of a kind, its biases random too, with the tokenizer of `tiny`."""
    torch.manual_seed(seed)
    config = type(CONFIGS[kind]).from_dict({**CONFIGS[kind].to_dict(), **changes})
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def open_client(folder: Path, mask: str = "off", **options: Any) -> TenantClient:
    """A client of a provider in this process; without a mask in float arithmetic, so that results equal local ones."""
    own: dict[str, Any] = {"mask": mask, "cache": folder.with_name(f"{folder.name}-cache"), "progress": False}
    if mask == "off" and "arithmetic" not in options:
        own |= {"weights": "native", "arithmetic": "float"}
    if mask == "lattice":
        own["mask_options"] = TOY
    return TenantClient(f"inproc:{folder}", **{**own, **options})


@dataclass
class Recorder:
    """A logits processor that writes logits down and, where tokens are given, has exactly those chosen."""

    forced: Sequence[int] | None = None
    logits: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.logits.append(scores[0].clone())
        if self.forced is None:
            return scores
        chosen = torch.full_like(scores, -torch.inf)
        chosen[0, self.forced[len(self.logits) - 1]] = 0.0
        return chosen

    @property
    def stacked(self) -> torch.Tensor:
        """Shape (num_tokens, vocab_size)."""
        return torch.stack(self.logits)


class Gate:
    """A hook that holds the engine in the middle of a step until the test opens it."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.reached.set()
        assert self.open.wait(60.0)
        return scores


def alone(client: TenantClient, prompt: str, num_new: int) -> torch.Tensor:
    """The logits of `client.generate` for one prompt, shape (num_tokens, vocab_size)."""
    recorder = Recorder()
    client.generate(prompt, max_new_tokens=num_new, eos_token_id=[], logits_processor=[recorder])
    return recorder.stacked


def together(
    engine: Engine, prompts: Sequence[str], answers: Sequence[torch.Tensor], **options: Any
) -> list[torch.Tensor]:
    """The engine's logits for these prompts at once, with the tokens that are the likeliest in `answers`."""
    recorders = [Recorder(answer.argmax(dim=-1).tolist()) for answer in answers]
    submitted = [
        engine.submit(prompt, max_new_tokens=len(answer), eos_token_id=[], logits_processor=[recorder], **options)
        for prompt, answer, recorder in zip(prompts, answers, recorders, strict=True)
    ]
    for answer in submitted:
        answer.result(60)
    return [recorder.stacked for recorder in recorders]


def mean_kl(reference: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> float:
    """The mean over all positions of KL(reference, got), in nats."""
    p, q = (torch.cat(list(each)).double().log_softmax(dim=-1) for each in (reference, got))
    return float((p.exp() * (p - q)).sum(dim=-1).mean())
