"""Compares a remote model with the same model run locally: logits, gradients and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.tiny_models import VOCAB

TARGETS = {"gpt2": ["c_attn", "c_proj", "c_fc"], "llama": "all-linear", "gemma": "all-linear"}
"""The layers with an adapter, by the kind of the model."""
RELATIVE = 1e-4
"""Largest relative distance of two results of the same fp32 operations in another order."""


def lora(kind: str) -> LoraConfig:
    """Returns a small adapter for every layer that a model of this kind has served."""
    return LoraConfig(
        r=4, lora_alpha=8, target_modules=TARGETS[kind], fan_in_fan_out=kind == "gpt2", task_type="CAUSAL_LM"
    )


def batch(seed: int = 1, shape: tuple[int, int] = (2, 12)) -> torch.Tensor:
    """Returns random token ids of that shape."""
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Returns the distance of two tensors as a part of the second one's norm."""
    return float((got - want).norm() / want.norm().clamp_min(1e-30))


def adapted(model: Any, config: Any, seed: int = 3) -> Any:
    """Returns the model with an adapter whose B is not zero, the same on both sides."""
    torch.manual_seed(seed)
    peft_model = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return peft_model


def local(folder: Path) -> PreTrainedModel:
    """Returns the model of a folder as stock transformers load it."""
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def grads(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the gradients of a batch's loss, by the parameter's name."""
    model(ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def losses_of_steps(model: Any, ids: torch.Tensor, learning_rate: float, num_steps: int = 5) -> list[float]:
    """Trains a model's adapter on one batch and returns the loss before each step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
