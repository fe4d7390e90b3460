"""Tests that logits, gradients, training, greedy tokens and reloading in stock PEFT give the same results as local
transformers + PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel

from provider.model.load import load, resolve
from provider.model.served_model import ServedModel
from provider.model.weights import serve_model
from tenant_sdk import TenantClient
from tests.support.parity import RELATIVE, TARGETS, adapted, batch, grads, local, lora, losses_of_steps, relative
from tests.support.tiny_models import make_tiny
from wire.transport.inproc import InprocConnection

KINDS = ("llama", "gpt2", "gemma")


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Provides (kind, folder, function that makes the local model, client) with native weights and float arithmetic,
    without a mask."""
    kind: str = request.param
    folder = tmp_path_factory.mktemp(kind)
    make_tiny(kind, folder)
    client = TenantClient(f"inproc:{folder}", weights="native", mask="off", arithmetic="float", cache=folder / "cache")
    with client:
        yield kind, folder, client


def test_logits_and_lora_gradients(pair: Any) -> None:
    kind, folder, client = pair
    ids = batch()
    ours, theirs = adapted(client.load_model(), lora(kind)), adapted(local(folder), lora(kind))
    with torch.no_grad():
        assert relative(ours(ids).logits, theirs(ids).logits) < RELATIVE
    got, want = grads(ours, ids), grads(theirs, ids)
    assert got.keys() == want.keys()
    assert len(want) > 8
    for name, gradient in want.items():
        assert relative(got[name], gradient) < RELATIVE, name


@pytest.mark.parametrize("patterns", ["*.mlp.*", "*, !*.layers.0.*, !lm_head", "*v_proj"])
def test_layers_that_are_not_served_are_the_tenants_own(
    patterns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--base-layers` the provider serves some layers, and the tenant gets the others with the bundle. An adapter
    changes both alike, and results equal local ones."""
    make_tiny("llama", tmp_path)
    served_model = ServedModel(serve_model(load(resolve(str(tmp_path))), "native", patterns.replace(" ", "")))
    monkeypatch.setattr("tenant_sdk.embedded.connect_inproc", lambda *_: InprocConnection(served_model))
    with TenantClient("inproc:part", mask="off", arithmetic="float", cache=tmp_path / "cache") as client:
        served = {layer.name for group in client.connect().groups for layer in group.layers}
        assert 0 < len(served) < 14
        ours, theirs = adapted(client.load_model(), lora("llama")), adapted(local(tmp_path), lora("llama"))
        ids = batch()
        with torch.no_grad():
            assert relative(ours(ids).logits, theirs(ids).logits) < RELATIVE
        got, want = grads(ours, ids), grads(theirs, ids)
    assert got.keys() == want.keys()
    assert all(relative(got[name], gradient) < RELATIVE for name, gradient in want.items())


def test_five_optimizer_steps(pair: Any) -> None:
    kind, folder, client = pair
    models = adapted(client.load_model(), lora(kind)), adapted(local(folder), lora(kind))
    histories = [losses_of_steps(model, batch(), 5e-2) for model in models]
    assert histories[0] == pytest.approx(histories[1], rel=RELATIVE)
    first, *later = histories[0]
    assert any(loss != pytest.approx(first, rel=1e-3) for loss in later), "nothing was trained"


def test_greedy_tokens(pair: Any) -> None:
    kind, folder, client = pair
    prompt = batch(7, (1, 5))
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ours = adapted(client.load_model(), lora(kind)).generate(input_ids=prompt, **options)
    theirs = adapted(local(folder), lora(kind)).generate(input_ids=prompt, **options)
    assert ours.shape[1] == 17
    assert torch.equal(ours, theirs)


def test_saved_adapter_in_stock_peft(pair: Any, tmp_path: Path) -> None:
    kind, folder, client = pair
    ours = adapted(client.load_model(), lora(kind))
    ours.save_pretrained(tmp_path / "adapter")
    stock = PeftModel.from_pretrained(local(folder), tmp_path / "adapter").eval()
    bare = local(folder)
    ids = batch()
    with torch.no_grad():
        want = ours(ids).logits
        assert relative(stock(ids).logits, want) < RELATIVE
        assert relative(bare(ids).logits, want) > 1e-3, "the adapter changes nothing"


def test_trained_bias_matches_local(pair: Any) -> None:
    """With bias="all", PEFT trains the base biases. The provider's frozen bias must not be added a second time."""
    kind, folder, client = pair
    if kind != "gpt2":
        pytest.skip("this model has no biases")
    config = LoraConfig(r=4, target_modules=TARGETS[kind], fan_in_fan_out=True, bias="all", task_type="CAUSAL_LM")
    logits = []
    for model in (adapted(client.load_model(), config), adapted(local(folder), config)):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
        for _ in range(2):
            model(batch(), labels=batch()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        logits.append(model(batch()).logits.detach())
    assert relative(logits[0], logits[1]) < RELATIVE


def test_ia3_changes_the_input_of_one_member(tmp_path: Path) -> None:
    """IA3 scales the input of up_proj but not that of gate_proj, so these layers no longer share a call. Gradients
    still equal local ones."""
    make_tiny("llama", tmp_path)
    config = IA3Config(target_modules=["k_proj", "up_proj"], feedforward_modules=["up_proj"], task_type="CAUSAL_LM")
    with TenantClient(f"inproc:{tmp_path}", weights="native", mask="off", arithmetic="float") as client:
        ours, theirs = adapted(client.load_model(), config), adapted(local(tmp_path), config)
        for model in (ours, theirs):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "ia3" in name:
                        parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()).view_as(parameter))
        got, want = grads(ours, batch()), grads(theirs, batch())
        for name, gradient in want.items():
            assert relative(got[name], gradient) < RELATIVE, name


@pytest.mark.parametrize("kind", KINDS)
def test_int8_ring_is_close_and_float_agrees_with_it(kind: str, tmp_path: Path) -> None:
    """Both arithmetics use the same int8 weights, so their results differ only by the rounding of activations."""
    make_tiny(kind, tmp_path)
    with (
        TenantClient(f"inproc:{tmp_path}", weights="int8", mask="off", arithmetic="ring") as ring,
        TenantClient(f"inproc:{tmp_path}", weights="int8", mask="off", arithmetic="float") as floating,
    ):
        a, b = adapted(ring.load_model(), lora(kind)), adapted(floating.load_model(), lora(kind))
        with torch.no_grad():
            assert relative(a(batch()).logits, b(batch()).logits) < 2e-5
            exact = adapted(local(tmp_path), lora(kind))(batch()).logits
            assert 1e-6 < relative(a(batch()).logits, exact) < 5e-2
        got, want = grads(a, batch()), grads(b, batch())
        for name, gradient in want.items():
            assert relative(got[name], gradient) < 1e-4, name
