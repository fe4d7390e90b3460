"""Compares a remote model with the same model run locally, by logits, gradients and adapters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tests.support.tiny_models import VOCAB
from wire.ring.quantise import quantise

TARGETS = {"gpt2": ["c_attn", "c_proj", "c_fc"], "llama": "all-linear", "gemma": "all-linear"}
"""The layers that get an adapter, by kind of model."""
RELATIVE = 1e-4
"""The largest relative distance between two results of the same fp32 operations in different order."""


def lora(kind: str) -> LoraConfig:
    """Returns a small LoRA adapter config for every served layer of a model of this kind."""
    return LoraConfig(
        r=4, lora_alpha=8, target_modules=TARGETS[kind], fan_in_fan_out=kind == "gpt2", task_type="CAUSAL_LM"
    )


def batch(seed: int = 1, shape: tuple[int, int] = (2, 12)) -> torch.Tensor:
    """Returns random token ids of the given shape."""
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Returns the distance of two tensors, divided by the norm of the second one."""
    return float(((got - want).norm() / want.norm().clamp_min(1e-30)).detach())


def adapted(model: Any, config: Any, seed: int = 3) -> Any:
    """Returns the model with an adapter whose B is not zero. The adapter is the same for the remote and the local
    model, and on every device: its numbers are drawn on the CPU."""
    torch.manual_seed(seed)
    peft_model = get_peft_model(model, config)
    torch.manual_seed(seed)  # What PEFT drew depends on the model's device.
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_A" in name:
                parameter.copy_(torch.nn.init.kaiming_uniform_(torch.empty(parameter.shape), a=math.sqrt(5)))
            if "lora_B" in name:
                parameter.copy_(torch.empty(parameter.shape).normal_(std=0.05))
    return peft_model


def local(folder: Path) -> PreTrainedModel:
    """Returns the model in a folder, loaded by transformers as usual."""
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def grads(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the gradients of the loss on a batch, by parameter name."""
    model(ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def losses_of_steps(model: Any, ids: torch.Tensor, learning_rate: float, num_steps: int = 5) -> list[float]:
    """Trains the adapter of a model on one batch, and returns the loss before each step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def dequantised(folder: Path) -> Any:
    """Returns the local model in a folder, with each served layer's weight rounded to int8 and scaled back."""
    model: Any = local(folder)
    for layer in model.modules():
        if not isinstance(layer, nn.Linear | Conv1D) or layer.weight is model.get_input_embeddings().weight:
            continue
        is_conv = isinstance(layer, Conv1D)
        quantised, alpha = quantise(layer.weight if is_conv else layer.weight.t())
        weight = quantised * alpha
        with torch.no_grad():
            layer.weight.copy_(weight if is_conv else weight.t())
    return model
