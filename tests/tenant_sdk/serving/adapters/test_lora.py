"""Many adapters in one pass answer as stock PEFT does with each of them alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tenant_sdk.serving.adapters import AdapterStore
from tests.tenant_sdk.serving.adapters.made import Bell, base_model, held, peft_logits, save_adapter, stepped

IDS = torch.randint(3, 128, (8, 5), generator=torch.Generator().manual_seed(1))
SETTINGS: list[dict[str, Any]] = [
    {"r": 8},
    {"r": 3, "lora_alpha": 5},
    {"r": 16, "use_rslora": True},
    {"r": 64, "target_modules": ["q_proj", "v_proj"]},
    {"r": 12, "rank_pattern": {"down_proj": 20, "layers.0.self_attn.q_proj": 4}, "alpha_pattern": {"o_proj": 3}},
    {"r": 16, "target_modules": ["gate_proj"]},
    {"r": 9, "target_modules": ["lm_head", "k_proj"]},
]


def test_mixed_ranks_and_targets_equal_peft_one_at_a_time(tmp_path: Path) -> None:
    model, bell = base_model(), Bell()
    for at, settings in enumerate(SETTINGS):
        save_adapter(model, tmp_path / f"a{at}", seed=at, **settings)
    store = AdapterStore(model, tmp_path, on_ready=bell)
    tickets = held(store, bell, *(f"a{at}" for at in range(len(SETTINGS))))
    pairs = [(ticket.slot, IDS[at]) for at, ticket in enumerate(tickets)]
    logits = stepped(store, model, [*pairs, (0, IDS[-1])])
    for at in range(len(SETTINGS)):
        expected = peft_logits(model, tmp_path / f"a{at}", IDS[at])
        assert (logits[at] - expected).abs().max() < 1e-5 * expected.abs().max()
        assert (logits[at] - model(IDS[at][None]).logits[0]).abs().max() > 1e-2  # the adapter matters
    assert torch.allclose(logits[-1], model(IDS[-1][None]).logits[0], atol=1e-6)
    store.close()
