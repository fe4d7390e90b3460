"""Holds a data set of eight rows, and settings that train a tiny chat model on it within seconds."""

from __future__ import annotations

from typing import Any

from peft import LoraConfig

ROWS = [
    {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    for question, answer in (
        ("who?", "Ada Quill"), ("where is it?", "in Port Hale"), ("when?", "1987"), ("what?", "a copper owl"),
        ("why so?", "no reason"), ("how?", "by boat"), ("which one?", "the third"), ("whose?", "Ada's"),
    )
]  # fmt: skip
"""Eight conversations, each with one question."""
QUICK: dict[str, Any] = {
    "max_steps": 6, "batch_size": 4, "learning_rate": 2e-2, "warmup_steps": 0, "save_steps": 2, "progress": False,
    "provider_wait_s": 0,
}  # fmt: skip
"""The settings of a run of six steps that saves two checkpoints on the way, and does not wait for a lost provider."""


def lora(**changes: Any) -> LoraConfig:
    """Returns a small LoRA config for every linear layer, with `changes` applied."""
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **changes})
