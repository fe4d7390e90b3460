"""Tests that an adapter of each kind, in one pass with LoRA and the base model, gives the logits of stock PEFT."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from runtime.loading import loading
from tenant_sdk.serving.adapters import AdapterStore
from tests.support.saved_adapters import (
    EXAMPLES,
    OF_CONV1D,
    Bell,
    base_model,
    held,
    peft_logits,
    save_adapter,
    save_kind,
    stepped,
)

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set")
IDS = torch.randint(3, 128, (6, 5), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=("llama", "gpt2"))
def beside(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path, Any]:
    """Provides a kind of model, a base model of this kind, the folder of a LoRA adapter, and the logits of stock PEFT
    with this adapter for the second sequence of `IDS`."""
    kind = request.param
    stock = base_model(kind)
    folder = save_adapter(stock, tmp_path_factory.mktemp(kind) / "lora", seed=3, fan_in_fan_out=kind == "gpt2")
    return kind, stock, folder, peft_logits(stock, folder, IDS[1])


@pytest.mark.parametrize("title", EXAMPLES)
def test_a_kind_beside_lora_and_the_base_model_equals_peft(
    title: str, beside: tuple[str, Any, Path, Any], tmp_path: Path
) -> None:
    kind, stock, lora, lora_logits = beside
    if kind == "gpt2" and title not in OF_CONV1D:
        pytest.skip("PEFT has no layer of this kind for Conv1D")
    save_kind(stock, kind, tmp_path / "own", title, seed=1)
    (tmp_path / "lora").mkdir()
    for file in lora.iterdir():
        (tmp_path / "lora" / file.name).hardlink_to(file)
    before, bell, model = torch.get_rng_state(), Bell(), copy.deepcopy(stock)
    store = AdapterStore(model, tmp_path, on_ready=bell)
    own, other = (loan.adapter_index for loan in held(store, bell, "own", "lora"))
    got = stepped(store, model, [(own, IDS[0]), (other, IDS[1]), (0, IDS[2]), (own, IDS[3])])
    assert torch.equal(torch.get_rng_state(), before)
    store.close()
    plain = stock(IDS[:4]).logits
    with loading():
        adapted = PeftModel.from_pretrained(copy.deepcopy(stock), str(tmp_path / "own")).eval()
    with torch.no_grad():
        first, last = adapted(IDS[[0, 3]]).logits
    for logits, expected in zip(got, (first, lora_logits, plain[2], last), strict=True):
        assert (logits - expected).abs().max() < 2e-6 * expected.abs().max()
    for at in (0, 1, 3):
        assert (got[at] - plain[at]).abs().max() > 1e-3  # the adapter matters
