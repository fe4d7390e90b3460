"""Over a provider's layers adapters change the tenant's numbers and none of the calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tenant_sdk import TenantClient
from tenant_sdk.serving.adapters import AdapterStore
from tests.conftest import make_tiny
from tests.tenant_sdk.serving.adapters.made import Bell, held, peft_logits, save_adapter, stepped
from wire.frame import Call

IDS = torch.randint(3, 128, (4, 6), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_equal_to_stock_peft_and_no_other_call(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = make_tiny(kind, tmp_path / "tiny")
    for at in range(3):
        save_adapter(stock, tmp_path / "adapters" / f"a{at}", seed=at, r=8 + 5 * at, fan_in_fan_out=kind == "gpt2")
    bell = Bell()
    with TenantClient(f"inproc:{tmp_path / 'tiny'}", weights="native", mask="off", arithmetic="float") as client:
        model = client.load_model()
        store = AdapterStore(model, tmp_path / "adapters", on_ready=bell)
        tickets = held(store, bell, "a0", "a1", "a2")
        calls = _record(client, monkeypatch)
        with torch.no_grad():
            model(IDS)
        plain = calls.copy()
        calls.clear()
        logits = stepped(store, model, [*((ticket.slot, IDS[at]) for at, ticket in enumerate(tickets)), (0, IDS[3])])
        assert calls == plain
        assert len(calls) > 0
        store.close()
    for at in range(3):
        expected = peft_logits(stock, tmp_path / "adapters" / f"a{at}", IDS[at])
        assert (logits[at] - expected).abs().max() < 2e-5 * expected.abs().max()
    with torch.no_grad():
        assert torch.allclose(logits[3], stock(IDS[3:]).logits[0], atol=1e-5)


def _record(client: TenantClient, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Call, torch.Size]]:
    """Every call that reaches the provider, and the shape of its rows."""
    seen: list[tuple[Call, torch.Size]] = []
    connection: Any = client._open().connections[0]
    submit = connection.submit

    def spy(call: Call, rows: torch.Tensor, cols: int) -> Any:
        seen.append((call, rows.shape))
        return submit(call, rows, cols)

    monkeypatch.setattr(connection, "submit", spy)
    return seen
