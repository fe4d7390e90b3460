"""Adapters of every kind, beside LoRA and the base model in one pass, answer as stock PEFT does with each alone."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from tenant_sdk.serving.adapters import AdapterStore
from tests.support.saved_adapters import Bell, base_model, held, peft_logits, save_adapter, stepped
from tests.support.saved_kinds import EXAMPLES, OF_CONV1D, save_kind

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set")
IDS = torch.randint(3, 128, (6, 5), generator=torch.Generator().manual_seed(1))
CASES = [("llama", title) for title in EXAMPLES] + [("gpt2", title) for title in OF_CONV1D]


@pytest.mark.parametrize(("kind", "title"), CASES)
def test_a_kind_beside_lora_and_the_base_model_equals_peft(kind: str, title: str, tmp_path: Path) -> None:
    model, bell = base_model(kind), Bell()
    stock = copy.deepcopy(model)
    for seed in (1, 2):
        save_kind(stock, kind, tmp_path / f"own{seed}", title, seed)
    save_adapter(stock, tmp_path / "lora", seed=3, fan_in_fan_out=kind == "gpt2")
    before = torch.get_rng_state()
    store = AdapterStore(model, tmp_path, on_ready=bell)
    names = ["own1", "own2", "lora"]
    slots = [ticket.slot for ticket in held(store, bell, *names)]
    rows = [(slots[0], IDS[0]), (slots[1], IDS[1]), (slots[2], IDS[2]), (0, IDS[3]), (slots[0], IDS[4])]
    got = stepped(store, model, rows)
    assert torch.equal(torch.get_rng_state(), before)
    for name, ids, logits in zip([*names, None, "own1"], IDS, got, strict=False):
        plain = stock(ids[None]).logits[0]
        expected = plain if name is None else peft_logits(stock, tmp_path / name, ids)
        assert (logits - expected).abs().max() < 2e-6 * expected.abs().max()
        if name is not None:
            assert (logits - plain).abs().max() > 1e-3  # the adapter matters
    store.close()
