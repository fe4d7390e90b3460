"""Tests that adapters over a provider's layers change the tenant's results and none of the calls."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tenant_sdk import TenantClient
from tenant_sdk.serving.adapters import AdapterStore
from tests.support.saved_adapters import Bell, held, peft_logits, save_adapter, stepped
from tests.support.tiny_models import make_tiny

IDS = torch.randint(3, 128, (4, 6), generator=torch.Generator().manual_seed(2))
GROUPS = 2 * 4 + 1
"""The number of groups: in each of two blocks qkv, o, gate and up, and down (for GPT-2 c_attn, c_proj, c_fc, c_proj),
and the head."""


def traffic(client: TenantClient) -> torch.Tensor:
    seen = client.traffic
    return torch.tensor([seen.calls, seen.bytes_up, seen.bytes_down])


@pytest.mark.parametrize(("kind", "num_calls"), [("llama", GROUPS), ("gpt2", GROUPS - 1)])
def test_equal_to_stock_peft_and_no_other_call(kind: str, num_calls: int, tmp_path: Path) -> None:
    """With every adapter, logits equal those of stock PEFT, and the calls are those of the base model. GPT-2's head is
    tied to its embedding, so it stays with the tenant and makes no call."""
    stock = make_tiny(kind, tmp_path / "tiny")
    for at in range(3):
        save_adapter(stock, tmp_path / "adapters" / f"a{at}", seed=at, r=8 + 5 * at, fan_in_fan_out=kind == "gpt2")
    bell = Bell()
    with TenantClient(f"inproc:{tmp_path / 'tiny'}", weights="native", mask="off", arithmetic="float") as client:
        model = client.load_model()
        store = AdapterStore(model, tmp_path / "adapters", on_ready=bell)
        loans = held(store, bell, "a0", "a1", "a2")
        start = traffic(client)
        with torch.no_grad():
            model(IDS)
        plain = traffic(client)
        logits = stepped(store, model, [*((loan.adapter_index, IDS[at]) for at, loan in enumerate(loans)), (0, IDS[3])])
        assert torch.equal(traffic(client) - plain, plain - start)
        assert (plain - start)[0] == num_calls
        store.close()
    for at in range(3):
        expected = peft_logits(stock, tmp_path / "adapters" / f"a{at}", IDS[at])
        assert (logits[at] - expected).abs().max() < 2e-5 * expected.abs().max()
    with torch.no_grad():
        assert torch.allclose(logits[3], stock(IDS[3:]).logits[0], atol=1e-5)
