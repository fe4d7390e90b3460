"""Tests a model whose rows the lattice mask hides: results, gradients, tokens, and the rows that are sent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from tenant_sdk.model.padding import Padding
from tenant_sdk.model.run_state import NotFiniteWarning
from tests.support.lattice import BACKWARD, DEFAULT, FORWARD, bounds, wide
from tests.support.mask_site import MODEL_NOISE, Site, specs, taken, unmasked
from tests.support.parity import adapted, batch, grads, relative
from tests.support.providers import make_served_model
from tests.support.training import QUICK, ROWS, lora
from wire.limits import Limits

pytestmark = pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")


# ---- lattice: results -----------------------------------------------------------------------------------------------
BF16 = 2.0**-8
"""The relative error of rounding to bfloat16."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_every_layer_forward_and_backward(connect: Any, site: Site, kind: str, dtype: torch.dtype) -> None:
    """The model has fused groups, Conv1D and biases, and the mask has the default parameters. Differences are within
    what error and rounding imply."""
    client, (watched,) = connect(kind, dtype=dtype)
    model, spec_of = client.load_model(), specs(client)
    for info in client.connect().groups:
        spec, served = spec_of[info.id], site.served_models[kind].served.groups[info.id]
        generator = torch.Generator().manual_seed(info.id)
        x = torch.randn(2, 5, info.in_features, generator=generator).to(dtype).requires_grad_()
        x.data[0, 0] = 0.0
        x.data[1, 3, 2] = 1e4
        gradient = torch.randn(2, 5, info.out_features, generator=generator).to(dtype)
        before = len(watched.products())
        outputs = [model.get_submodule(layer.name)(x) for layer in info.layers]
        y = torch.cat(outputs, dim=-1)
        y.backward(gradient)
        assert len(watched.products()) == before + 2, "one call each way for all members of a group"
        given = x.detach().float().flatten(0, 1)
        exact, bound, _ = bounds(spec, FORWARD, served.quantised, given, DEFAULT, 128)
        if served.bias is not None:
            exact = exact + wide(served.bias)
        assert y.dtype is dtype
        assert_within(y, exact, bound, dtype)
        back, back_bound, _ = bounds(spec, BACKWARD, served.quantised, gradient.float().flatten(0, 1), DEFAULT, 128)
        assert x.grad is not None
        assert_within(x.grad, back, back_bound, dtype)


def assert_within(got: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor, dtype: torch.dtype) -> None:
    """Checks that a result differs from the exact one by no more than the bound and the rounding of its dtype."""
    distance = (wide(got.detach().flatten(0, 1)) - exact).abs()
    fp = 2.0**-22 if dtype is torch.float32 else BF16
    largest = exact.abs().amax() if dtype is torch.bfloat16 else exact.abs()
    assert bool((distance <= bound + fp * largest + 1e-37).all())


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_logits_and_lora_gradients(connect: Any, site: Site, kind: str) -> None:
    targets: Any = ["c_attn", "c_proj", "c_fc"] if kind == "gpt2" else "all-linear"
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, fan_in_fan_out=kind == "gpt2", task_type="CAUSAL_LM")
    client, _ = connect(kind)
    ours, theirs = adapted(client.load_model(), config), adapted(unmasked(site, kind), config)
    with torch.no_grad():
        distance = relative(ours(batch()).logits, theirs(batch()).logits)
    assert 1e-8 < distance < MODEL_NOISE, "equal numbers would mean that nothing was masked"
    got, want = grads(ours, batch()), grads(theirs, batch())
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert relative(got[name], gradient) < 2 * MODEL_NOISE, name  # twice as many groups, there and back


@pytest.mark.parametrize("mask", ["lattice", "pad"])
@pytest.mark.parametrize("precision", ["balanced", "short"])
def test_logits_and_gradients_of_rounded_rows(
    connect: Any, site: Site, folders: dict[str, Path], mask: str, precision: str
) -> None:
    """The error of a group's result is at most `share` of it, and that of a short reply √d · 2^16 / (√12 · 2^31)
    besides. Nine groups in a row add up to nine times as much; see `MODEL_NOISE`."""
    if (mask, precision) == ("pad", "short"):
        pytest.skip("pads need verify, and short replies cannot be checked")
    options = {"mask": mask, "mask_options": {"precision": precision}} | (
        {"verify": folders["llama"]} if mask == "pad" else {}
    )
    client, (watched,) = connect("llama", **options)
    groups = client.connect().groups
    widest = max(max(info.in_features, info.out_features) for info in groups)
    norm = max(max(info.max_column_norm, info.max_row_norm) for info in groups)
    share = 2.0**8 * math.sqrt(widest) * norm / (math.sqrt(12) * 2.0**31)
    if precision == "short":
        share += math.sqrt(widest) * 2.0**16 / (math.sqrt(12) * 2.0**31)
    noise = 9 * share + MODEL_NOISE
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    ours, theirs = adapted(client.load_model(), config), adapted(unmasked(site), config)
    with torch.no_grad():
        distance = relative(ours(batch()).logits, theirs(batch()).logits)
    assert 2e-5 < distance < noise, "less would mean that nothing was rounded"
    got, want = grads(ours, batch()), grads(theirs, batch())
    for name, gradient in want.items():
        assert relative(got[name], gradient) < 2 * noise, name
    calls = {(call.bits, call.reply_bits) for call, rows in watched.seen if isinstance(rows, torch.Tensor)}
    if calls != {(32, 32)}:  # behind a stream, the model is asked for products of 32-bit numbers
        assert calls == {(24, 16 if precision == "short" else 24)}
    assert not any(bool((rows & 0xFF).any()) for rows in watched.products())


@pytest.mark.parametrize("name", ["conservative", "lean"])
def test_other_parameters(site: Site, name: str) -> None:
    client, _ = site.inproc("llama", mask_options={"parameters": name})
    noise = {"conservative": 1.2, "lean": 10.0}[name] * MODEL_NOISE  # hints of 2048 rows; σ is ten times as large
    with torch.no_grad():
        assert relative(client.load_model()(batch()).logits, unmasked(site)(batch()).logits) < noise


def test_streamed_hints(site: Site, tmp_path: Path) -> None:
    client, (watched,) = site.inproc("llama", mask_options={"hints": "stream"})
    with torch.no_grad():
        assert relative(client.load_model()(batch()).logits, unmasked(site)(batch()).logits) < MODEL_NOISE
    assert watched.hints()
    assert not (tmp_path / "cache" / "hints").exists()


def greedy(model: Any, ids: torch.Tensor) -> Any:
    return model.generate(
        input_ids=ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip


@pytest.mark.parametrize("pool", ["memory", "disk"])
def test_generation_with_a_cache_gives_the_unmasked_tokens(
    connect: Any, site: Site, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = batch(7, (2, 5))
    want = greedy(unmasked(site), prompt)
    top = torch.stack(want.logits).topk(2).values
    margin = float(((top[..., 0] - top[..., 1]) / torch.stack(want.logits).norm(dim=-1)).min())
    assert margin > 10 * MODEL_NOISE, "the test's own premise: no near ties"
    client, (watched,) = connect("llama", mask_options={"pool": pool})
    model, rows = client.load_model(), taken(monkeypatch)
    assert torch.equal(greedy(model, prompt).sequences, want.sequences)
    assert {len(sent) for sent in watched.products()} == {10, 2}, "a cache sends one row a token"
    assert len(rows) == len(set(rows))


# ---- lattice: what is sent ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"mask_options": {"background": False}}], ids=["worker", "on use"])
def test_gradient_checkpointing_draws_fresh_rows(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """A layer that is recomputed sends the activations of the first pass again, up to noise. If the mask were the
    same, too, the provider could subtract the two messages and would see the difference of the activations."""
    forwards = []
    for checkpointing in (False, True):
        client, (watched,) = site.inproc("llama", **options)
        rows = taken(monkeypatch)
        client.finetune(
            ROWS, lora(), tmp_path / f"out{checkpointing}",
            **QUICK | {"max_steps": 2, "gradient_checkpointing": checkpointing},
        )  # fmt: skip
        sent = [bytes(row.numpy()) for tensor in watched.products() for row in tensor]
        assert len(sent) == len(rows)
        assert len(set(sent)) == len(sent)
        assert len(set(rows)) == len(rows)
        forwards.append(len(watched.products(FORWARD)))
    assert forwards[1] > 1.7 * forwards[0], "nothing was recomputed"


def test_padded_and_zero_rows_are_masked(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding of the padding token is zero, and so is its normalised row in the first layer. A provider must not
    see this where padding is sent."""
    monkeypatch.setattr(Padding, "leave_out", lambda self, model: None)
    client, (watched,) = site.inproc("llama")
    model: Any = client.load_model()
    ids, attention = batch(3, (4, 16)), torch.ones(4, 16, dtype=torch.int64)
    for row, padding in enumerate((0, 5, 9, 15)):
        ids[row, :padding], attention[row, :padding] = 0, 0
    assert not bool(model.get_input_embeddings()(torch.tensor([0])).any()), "the test's own premise"
    with torch.no_grad():
        model(input_ids=ids, attention_mask=attention)
    assert all(len(rows) == 64 for rows in watched.products()), "as many rows as positions, padded or not"
    first = watched.products()[0][attention.flatten() == 0]
    assert len({bytes(row.numpy()) for row in first}) == 29
    zeros = (first == 0).sum()
    assert int(zeros) <= 3  # of 928 uniform numbers
    small = (first.abs() < 2**24).float().mean()
    assert 0.0 <= float(small) < 0.05  # 2^-7 of uniform ones


def test_two_runs_on_the_same_data_share_no_message(site: Site) -> None:
    seen: list[bytes] = []
    for _ in range(2):
        client, (watched,) = site.inproc("llama")
        model = client.load_model()
        with torch.no_grad():
            model(batch())
        seen += [bytes(row.numpy()) for rows in watched.products() for row in rows]
    assert len(set(seen)) == len(seen)


def test_members_with_inputs_of_their_own_have_masks_of_their_own(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    client, (watched,) = site.inproc("llama")
    attention: Any = client.load_model().model.layers[0].self_attn
    rows, x = taken(monkeypatch), torch.randn(3, 32)
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection(x.clone())
    assert len(watched.products()) == 3
    assert len(set(rows)) == 9


def test_a_call_that_is_split_uses_each_row_once(
    site: Site, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = make_served_model(folders["llama"], "int8", Limits(max_rows=5))
    site.served_models = {**site.served_models, "narrow": narrow}
    client, (watched,) = site.inproc("narrow")
    model, want = client.load_model(), unmasked(site)
    rows = taken(monkeypatch)
    with torch.no_grad():
        assert relative(model(batch()).logits, want(batch()).logits) < MODEL_NOISE
    assert max(map(len, watched.products())) == 5
    assert len(set(rows)) == len(rows) == 9 * 24


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_zeros_go_out_under_fresh_rows_for_values_that_are_not_finite(
    site: Site, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, (watched,) = site.inproc("llama")
    layer: Any = client.load_model().model.layers[0].mlp.down_proj
    x = torch.randn(3, 64, requires_grad=True)
    y = layer(x)
    rows, sent = taken(monkeypatch), len(watched.products())
    x.data[1, 7] = bad
    with pytest.warns(NotFiniteWarning):
        assert not layer(x).any()
    y.backward(torch.full_like(y, bad))
    assert x.grad is not None
    assert not x.grad.any()
    assert list(map(len, watched.products()))[sent:] == [3, 3], "as many rows as there would have been"
    assert len(set(rows)) == len(rows) == 6
