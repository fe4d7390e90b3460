"""Saves random PEFT adapters of a tiny model, and computes the logits of stock PEFT with them."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from runtime.loading import loading
from tenant_sdk.serving.adapters import AdapterLoan, AdapterStore
from tests.support.tiny_models import tiny_config

WAIT_S = 60.0


def base_model(kind: str = "llama", seed: int = 0) -> Any:
    """Returns a frozen random model with the name tiny-KIND."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind)).eval().requires_grad_(False)
    model.name_or_path = model.config.name_or_path = f"tiny-{kind}"
    return model


def save_adapter(model: Any, folder: Path, seed: int, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Path:
    """Saves an untrained PEFT adapter whose factors are random numbers of dtype `dtype`."""
    config = LoraConfig(
        **{"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings}
    )
    with loading():
        adapted = get_peft_model(copy.deepcopy(model), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator).to(dtype) * 0.25)
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return folder


def peft_logits(model: Any, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Returns the logits of stock PEFT for one sequence."""
    with loading():
        adapted = PeftModel.from_pretrained(copy.deepcopy(model), str(folder)).eval()
    with torch.no_grad():
        logits: torch.Tensor = adapted(ids[None]).logits[0]
    return logits


class Bell:
    """Gives a store a function to call when a loan is ready or has failed, and lets a test wait for this call."""

    def __init__(self) -> None:
        self._rang = threading.Condition()

    def __call__(self) -> None:
        with self._rang:
            self._rang.notify_all()

    def wait_for(self, *loans: AdapterLoan) -> None:
        """Waits until all these loans are ready or have failed."""
        with self._rang:
            assert self._rang.wait_for(lambda: all(t.is_ready() or t.failure for t in loans), WAIT_S)


def held(store: AdapterStore, bell: Bell, *names: str) -> list[AdapterLoan]:
    """Reserves adapters, and waits until all of them are ready."""
    loans = [store.reserve(name) for name in names]
    bell.wait_for(*loans)
    for loan in loans:
        assert loan.failure is None, loan.failure
    return loans


def stepped(store: AdapterStore, model: Any, sequences: list[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
    """Returns the logits of sequences of the same length, computed in one pass, each with the adapter in its place."""
    order = sorted(range(len(sequences)), key=lambda at: sequences[at][0])
    ids = torch.stack([sequences[at][1] for at in order])
    rows = [sequences[at][0] for at in order for _ in range(ids.shape[1])]
    with torch.no_grad(), store.in_step(rows):
        logits = model(ids).logits
    return [logits[order.index(at)] for at in range(len(sequences))]
