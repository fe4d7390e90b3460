"""Tests that over a provider's layers no kind of adapter changes the calls of a step, even if the adapter changes the
input of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tenant_sdk import TenantClient
from tenant_sdk.serving.adapters import AdapterStore
from tests.support.saved_adapters import Bell, held, peft_logits, save_adapter, save_kind, stepped
from tests.support.tiny_models import make_tiny
from wire.errors import ConfigurationError, InvalidTensor

IDS = torch.randint(3, 128, (6, 6), generator=torch.Generator().manual_seed(2))
SHARED = 2 * 4 + 1
"""The number of calls of a step: four in each of two blocks, for qkv, o, gate and up, and down (in GPT-2 for c_attn,
c_proj, c_fc, c_proj), and one for the head. GPT-2's head stays with the tenant, and so has no call."""
SEPARATE = 2 * 7 + 1
"""The number of calls of a step if q, k, v, gate and up have one call each."""


def traffic(client: TenantClient) -> torch.Tensor:
    seen = client.traffic
    return torch.tensor([seen.calls, seen.bytes_up, seen.bytes_down])


def open_provider(folder: Path, **options: Any) -> TenantClient:
    own: dict[str, Any] = {"weights": "native", "mask": "off", "arithmetic": "float", **options}
    return TenantClient(f"inproc:{folder}", **own)


def check_equal(stock: Any, root: Path, names: Sequence[str | None], logits: Sequence[torch.Tensor]) -> None:
    """Compares logits with those of stock PEFT."""
    for name, ids, got in zip(names, IDS, logits, strict=False):
        with torch.no_grad():
            expected = stock(ids[None]).logits[0] if name is None else peft_logits(stock, root / name, ids)
        assert (got - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("kind", "separate_calls", "num_calls"),
    [("llama", False, SHARED), ("llama", True, SEPARATE), ("gpt2", False, SHARED - 1), ("gpt2", True, SHARED - 1)],
)
def test_calls_are_the_same_with_every_adapter(
    kind: str, separate_calls: bool, num_calls: int, tmp_path: Path
) -> None:  # fmt: skip
    """IA3 may scale inputs of layers that have a call of their own: down_proj of Llama, and all layers of GPT-2. OFT,
    and IA3 on other layers, need separate calls."""
    stock = make_tiny(kind, tmp_path / "tiny")
    root, bell = tmp_path / "adapters", Bell()
    save_kind(stock, kind, root / "ia3", "IA3", seed=1)
    save_kind(stock, kind, root / "vera", "VeRA", seed=2)
    save_adapter(stock, root / "lora", seed=3, fan_in_fan_out=kind == "gpt2")
    names: list[str | None] = ["ia3", "vera", "lora", None]
    if kind == "llama" and separate_calls:
        save_kind(stock, kind, root / "oft", "OFT", seed=4, target_modules=["q_proj", "k_proj", "up_proj", "o_proj"])
        ia3 = {"target_modules": ["k_proj", "gate_proj"], "feedforward_modules": ["k_proj"]}
        save_kind(stock, kind, root / "inputs", "IA3", seed=5, **ia3)
        names += ["oft", "inputs"]
    with open_provider(tmp_path / "tiny") as client:
        model = client.load_model()
        store = AdapterStore(model, root, on_ready=bell, separate_calls=separate_calls)
        indices = {None: 0}
        for name, loan in zip(filter(None, names), held(store, bell, *filter(None, names)), strict=True):
            indices[name] = loan.adapter_index
        counts = []
        for asked in ([None] * len(names), names, names[:1] * len(names), names[-1:] * len(names)):
            before = traffic(client)
            logits = stepped(store, model, [(indices[name], ids) for name, ids in zip(asked, IDS, strict=False)])
            counts.append(traffic(client) - before)
            check_equal(stock, root, asked, logits)
        store.close()
    assert all(torch.equal(count, counts[0]) for count in counts)
    assert counts[0][0] == num_calls


@pytest.mark.parametrize(
    ("title", "changes", "layer"),
    [
        ("OFT", {"target_modules": ["q_proj"]}, "model.layers.0.self_attn.q_proj"),
        ("BOFT", {"target_modules": ["o_proj", "up_proj"]}, "model.layers.0.mlp.up_proj"),
        ("IA3", {"target_modules": ["v_proj"], "feedforward_modules": ["v_proj"]}, "model.layers.0.self_attn.v_proj"),
    ],
)
def test_inputs_of_layers_that_share_a_call_are_not_changed_unasked(
    title: str, changes: dict[str, Any], layer: str, tmp_path: Path
) -> None:  # fmt: skip
    stock = make_tiny("llama", tmp_path / "tiny")
    save_kind(stock, "llama", tmp_path / "adapters" / "one", title, seed=1, **changes)
    with open_provider(tmp_path / "tiny") as client:
        store = AdapterStore(client.load_model(), tmp_path / "adapters")
        with pytest.raises(ConfigurationError) as refused:
            store.reserve("one")
        store.close()
    assert str(refused.value) == (
        f"the adapter one ({title}) changes the input of {layer}, which shares its call with other layers: "
        "it is served with separate_calls=True"
    )


def test_a_pass_with_other_rows_than_announced_sends_no_call(tmp_path: Path) -> None:
    stock = make_tiny("llama", tmp_path / "tiny")
    save_kind(stock, "llama", tmp_path / "adapters" / "one", "OFT", seed=1, target_modules=["q_proj"])
    bell = Bell()
    with open_provider(tmp_path / "tiny") as client:
        model = client.load_model()
        store = AdapterStore(model, tmp_path / "adapters", on_ready=bell, separate_calls=True)
        (loan,) = held(store, bell, "one")
        before = traffic(client)
        with (
            store.in_step([loan.adapter_index] * 4),
            torch.no_grad(),
            pytest.raises(InvalidTensor, match="6 rows in a step"),
        ):
            model(IDS[:1])
        assert torch.equal(traffic(client), before)
        store.close()
