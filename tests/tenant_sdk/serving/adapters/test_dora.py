"""Tests DoRA adapters in the store: over a provider's layers, beside LoRA in one batch, and from damaged files."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save, save_file

from attacks.programs.overflow import Fault, Overflower
from tenant_sdk import TenantClient, embedded
from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.adapters.reader import WEIGHTS
from tests.support.false_providers import Liar
from tests.support.mask_site import MODEL_NOISE
from tests.support.parity import dequantised
from tests.support.providers import make_served_model
from tests.support.saved_adapters import Bell, base_model, held, peft_logits, save_adapter, stepped
from tests.support.spies import before_requests
from tests.support.tiny_models import make_tiny
from wire.errors import NotFinite
from wire.frame import Call, Direction, Purpose
from wire.payload import Payload
from wire.transport.inproc import InprocConnection

pytestmark = pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")
IDS = torch.randint(3, 128, (6, 5), generator=torch.Generator().manual_seed(2))
SETTINGS: dict[str, dict[str, Any]] = {
    "dora": {"r": 8, "use_dora": True},
    "lora": {"r": 8},
    "dora-wide": {"r": 12, "use_dora": True, "rank_pattern": {"q_proj": 3}, "use_rslora": True},
    "dora-few": {"r": 8, "use_dora": True, "target_modules": ["k_proj", "lm_head"]},
    "lora-few": {"r": 5, "target_modules": ["q_proj", "down_proj"]},
}
ROWS_OF_A = [
    *((group, rows) for block in (0, 4) for group, rows in enumerate((24, 8, 16, 8), start=block)),  # dora
    *((group, rows) for block in (0, 4) for group, rows in enumerate((27, 12, 24, 12), start=block)),  # dora-wide
    *((group, 8) for group in (0, 4, 8)),  # dora-few
]
"""Group and number of rows of the calls for A·W. The groups of a block are qkv, o, gate and up, and down; group 8 is
the head."""
MASKS: dict[str, tuple[dict[str, Any], float]] = {
    "float": ({"mask": "off", "arithmetic": "float"}, 2e-5),
    "ring": ({"mask": "off", "arithmetic": "ring"}, 2e-5),
    "lattice": ({"mask": "lattice", "mask_options": {"hints": "stream", "background": False}}, 10 * MODEL_NOISE),
}
"""A client's options, and the largest error of a logit as a share of the largest logit. The noise of a mask is stated
for whole rows; a single logit may have a few times as much."""


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Provides a list of the products that are asked for: group, and number of rows."""
    seen: list[tuple[int, int]] = []

    def note(call: Call, payload: Payload) -> None:
        if call.purpose is Purpose.PRODUCT:
            seen.append((call.group, payload.num_rows))

    before_requests(monkeypatch, note)
    return seen


@pytest.mark.parametrize(("options", "distance"), MASKS.values(), ids=MASKS)
def test_a_batch_of_both_equals_stock_peft_on_the_dequantised_model(
    options: dict[str, Any], distance: float, tmp_path: Path, requests: list[tuple[int, int]]
) -> None:
    folder = tmp_path / "tiny"
    stock = make_tiny("llama", folder)
    for at, (name, settings) in enumerate(SETTINGS.items()):
        save_adapter(stock, tmp_path / "adapters" / name, seed=at, **settings)
    bell = Bell()
    with TenantClient(f"inproc:{folder}", cache=tmp_path / "cache", progress=False, **options) as client:
        model = client.load_model()
        store = AdapterStore(model, tmp_path / "adapters", on_ready=bell)
        loans = held(store, bell, *SETTINGS)
        assert sorted(requests) == sorted(ROWS_OF_A), "one call for each group, and none for LoRA"
        requests.clear()
        sequences = [(loan.adapter_index, IDS[at]) for at, loan in enumerate(loans)]
        logits = stepped(store, model, [*sequences, (0, IDS[5])])
        assert requests == [(group, IDS.numel()) for group in range(9)], "a step makes the calls of the base model"
        store.close()
    base = dequantised(folder)
    for at, name in enumerate(SETTINGS):
        expected = peft_logits(base, tmp_path / "adapters" / name, IDS[at])
        assert (logits[at] - expected).abs().max() < distance * expected.abs().max(), name
    expected = base(IDS[5:]).logits[0]
    assert (logits[5] - expected).abs().max() < distance * expected.abs().max()


def test_many_dora_adapters_in_one_product(tmp_path: Path) -> None:
    """Four adapters of one rank are multiplied by `grouped_mm`, with LoRA among them."""
    model, bell = base_model("gpt2"), Bell()
    for at in range(4):
        save_adapter(model, tmp_path / f"a{at}", seed=at, r=8, fan_in_fan_out=True, use_dora=at != 2)
    store = AdapterStore(model, tmp_path, on_ready=bell)
    loans = held(store, bell, *(f"a{at}" for at in range(4)))
    logits = stepped(store, model, [(loan.adapter_index, IDS[at]) for at, loan in enumerate(loans)])
    store.close()
    for at, got in enumerate(logits):
        expected = peft_logits(model, tmp_path / f"a{at}", IDS[at])
        assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


def test_memory_counts_the_gains(tmp_path: Path) -> None:
    model, bell = base_model(), Bell()
    for name, use_dora in (("dora", True), ("lora", False)):
        save_adapter(model, tmp_path / name, seed=1, r=8, target_modules=["q_proj"], use_dora=use_dora)
    used = []
    for name in ("lora", "dora"):
        store = AdapterStore(model, tmp_path, on_ready=bell)
        held(store, bell, name)
        used.append(store.status().host_bytes)
        store.close()
    assert used[1] - used[0] == 2 * 32 * 4


def test_an_answer_that_is_not_finite_fails_the_adapter_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tiny"
    stock = make_tiny("llama", folder)
    save_adapter(stock, tmp_path / "adapters" / "dora", seed=1, use_dora=True)
    save_adapter(stock, tmp_path / "adapters" / "lora", seed=2)
    provider = Overflower(make_served_model(folder, "int8"), Fault(Direction.FORWARD, math.nan, 0))
    monkeypatch.setattr(embedded, "connect_inproc", lambda *_: InprocConnection(provider))
    bell = Bell()
    with TenantClient("inproc:x", cache=tmp_path / "cache", mask="off", arithmetic="float") as client:
        store = AdapterStore(client.load_model(), tmp_path / "adapters", on_ready=bell)
        loan = store.reserve("dora")
        bell.wait_for(loan)
        assert isinstance(loan.failure, NotFinite)
        assert "\n" not in str(loan.failure)
        held(store, bell, "lora")
        store.close()


def test_false_norms_fail_the_adapter_before_anything_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tiny"
    stock = make_tiny("llama", folder)
    save_adapter(stock, tmp_path / "adapters" / "dora", seed=1, use_dora=True)
    liar = Liar(make_served_model(folder, "int8"))
    norms = load(liar.files["column_norms.safetensors"])
    norms["model.layers.1.mlp.down_proj"][3] = math.nan
    liar.files["column_norms.safetensors"] = save(norms)
    liar.announce()
    monkeypatch.setattr(embedded, "connect_inproc", lambda *_: InprocConnection(liar))
    bell = Bell()
    with TenantClient("inproc:x", cache=tmp_path / "cache", mask="off") as client:
        store = AdapterStore(client.load_model(), tmp_path / "adapters", on_ready=bell)
        loan = store.reserve("dora")
        bell.wait_for(loan)
        assert str(loan.failure) == (
            "the bundle's column norms of model.layers.1.mlp.down_proj are no norms that this layer can have"
        )
        assert liar.num_rows == []
        store.close()


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
Change = Callable[[dict[str, torch.Tensor]], object]
DAMAGED: dict[str, tuple[Change, str]] = {
    "no magnitudes": (lambda tensors: tensors.pop(KEY), "needs 32 magnitudes for .*q_proj', and has none"),
    "too few": (lambda tensors: tensors.update({KEY: torch.ones(31)}), r"and has the shape \(31,\)"),
    "a matrix": (lambda tensors: tensors.update({KEY: torch.ones(1, 32)}), r"and has the shape \(1, 32\)"),
    "NaN": (lambda tensors: tensors.update({KEY: torch.full((32,), math.nan)}), "no numbers, or more than"),
    "infinite": (lambda tensors: tensors.update({KEY: torch.full((32,), math.inf)}), "no numbers, or more than"),
    "huge": (lambda tensors: tensors.update({KEY: torch.full((32,), -1e9)}), "more than 10000 times the norms"),
    "twice": (lambda tensors: tensors.update({f"{KEY}.weight": torch.ones(32)}), "twice"),
    "a factor with three dimensions": (
        lambda tensors: tensors.update({KEY.replace("magnitude_vector", "A.weight"): torch.ones(8, 32, 1)}),
        "needs A and B of rank 8",
    ),
}


@pytest.mark.parametrize(("change", "text"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_are_one_line(change: Change, text: str, tmp_path: Path) -> None:
    model, bell = base_model(), Bell()
    save_adapter(model, tmp_path / "adapters" / "bad", seed=1, use_dora=True, target_modules=["q_proj"])
    tensors = load_file(tmp_path / "adapters" / "bad" / WEIGHTS)
    assert KEY in tensors
    change(tensors)
    save_file(tensors, tmp_path / "adapters" / "bad" / WEIGHTS)
    store = AdapterStore(model, tmp_path / "adapters", on_ready=bell)
    with pytest.raises(Exception, match=text) as failure:  # noqa: PT012 - numbers are only checked once they are read
        loan = store.reserve("bad")
        bell.wait_for(loan)
        raise loan.failure or AssertionError("the adapter was taken")
    assert "\n" not in str(failure.value)
    store.close()


def test_magnitudes_with_the_ending_of_a_module(tmp_path: Path) -> None:
    model, bell = base_model(), Bell()
    save_adapter(model, tmp_path / "adapters" / "dora", seed=1, use_dora=True, target_modules=["q_proj"])
    expected = peft_logits(base_model(), tmp_path / "adapters" / "dora", IDS[0])
    path = tmp_path / "adapters" / "dora" / WEIGHTS
    tensors = load_file(path)
    save_file({f"{key}.weight" if "magnitude" in key else key: value for key, value in tensors.items()}, path)
    store = AdapterStore(model, tmp_path / "adapters", on_ready=bell)
    (loan,) = held(store, bell, "dora")
    (got,) = stepped(store, model, [(loan.adapter_index, IDS[0])])
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
    store.close()
