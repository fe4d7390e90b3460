"""Tests that a pass with many adapters gives the same results as stock PEFT with each of them alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.adapters.adapted_layer import AdaptedLayer, CurrentStep
from tenant_sdk.serving.adapters.lora import AdapterIndices, Stack
from tests.support.saved_adapters import Bell, base_model, held, peft_logits, save_adapter, stepped
from wire.errors import ConfigurationError, InvalidTensor

IDS = torch.randint(3, 128, (12, 5), generator=torch.Generator().manual_seed(1))
LLAMA: list[dict[str, Any]] = [
    {"r": 8},
    {"r": 3, "lora_alpha": 5},
    {"r": 16, "use_rslora": True},
    {"r": 16, "lora_alpha": 12},
    {"r": 64, "target_modules": ["q_proj", "v_proj"]},
    {"r": 12, "rank_pattern": {"down_proj": 20, r"layers\.0\.self_attn\.q_proj": 4}, "alpha_pattern": {"o_proj": 3}},
    {"r": 16, "target_modules": ["gate_proj"]},
    {"r": 5, "target_modules": ["up_proj"]},
    {"r": 9, "target_modules": ["lm_head", "k_proj"]},
    {"r": 8, "use_dora": True},
    {"r": 3, "use_dora": True, "use_rslora": True, "target_modules": ["q_proj", "lm_head"]},
]
GPT2: list[dict[str, Any]] = [
    {"r": 8, "fan_in_fan_out": True},
    {"r": 6, "fan_in_fan_out": True, "target_modules": ["c_attn"]},
    {"r": 40, "fan_in_fan_out": True, "target_modules": ["c_proj", "c_fc"], "use_rslora": True},
    {"r": 8, "fan_in_fan_out": True, "use_dora": True},
]


@pytest.fixture(autouse=True)
def _dirty_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills newly allocated memory with NaN, so that a read of memory that was not written shows."""
    empty = torch.empty

    def dirty(*args: Any, **options: Any) -> torch.Tensor:
        made = empty(*args, **options)
        return made.fill_(float("nan")) if made.is_floating_point() and not made.is_meta else made

    monkeypatch.setattr(torch, "empty", dirty)


@pytest.mark.parametrize(("kind", "settings"), [("llama", LLAMA), ("gpt2", GPT2), ("gemma", LLAMA[:4])])
def test_mixed_ranks_and_targets_equal_peft_one_at_a_time(
    kind: str, settings: list[dict[str, Any]], tmp_path: Path
) -> None:
    model, bell = base_model(kind), Bell()
    stock = copy.deepcopy(model)
    for at, setting in enumerate(settings):
        save_adapter(model, tmp_path / f"a{at}", seed=at, **setting)
    store = AdapterStore(model, tmp_path, on_ready=bell)
    loans = held(store, bell, *(f"a{at}" for at in range(len(settings))))
    logits = stepped(store, model, [(0, IDS[-1]), *((loan.adapter_index, IDS[at]) for at, loan in enumerate(loans))])
    plain = [stock(ids[None]).logits[0] for ids in IDS]
    assert torch.allclose(logits[0], plain[-1], atol=1e-6)
    for at, got in enumerate(logits[1:]):
        expected = peft_logits(stock, tmp_path / f"a{at}", IDS[at])
        assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
        assert (got - plain[at]).abs().max() > 1e-3  # the adapter matters
    store.close()


def test_a_place_keeps_nothing_of_the_adapter_before(tmp_path: Path) -> None:
    """All adapters are put into the one place of rank 8. An adapter often replaces one with a larger rank, with more
    layers, or with DoRA's gains."""
    model, bell = base_model(), Bell()
    stock = copy.deepcopy(model)
    settings: list[dict[str, Any]] = [{"r": 8}, {"r": 8, "target_modules": ["q_proj"]}, {"r": 3}, {"r": 5}, {"r": 1}]
    settings += [{"r": 8, "use_dora": True}, {"r": 5, "use_dora": True, "target_modules": ["q_proj"]}]
    for at, setting in enumerate(settings):
        save_adapter(model, tmp_path / f"a{at}", seed=at, **setting)
    store = AdapterStore(model, tmp_path, on_ready=bell, device_slots=1)
    for at in (0, 1, 0, 2, 5, 3, 5, 1, 6, 2, 6, 4, 1):
        (loan,) = held(store, bell, f"a{at}")
        (got,) = stepped(store, model, [(loan.adapter_index, IDS[at])])
        expected = peft_logits(stock, tmp_path / f"a{at}", IDS[at])
        assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
        loan.release()
    store.close()


def test_a_place_keeps_nothing_beside_an_adapter_of_more_layers(tmp_path: Path) -> None:
    """Where an adapter of a step changes a layer, the factors of all places of its rank are multiplied."""
    model, bell = base_model(), Bell()
    stock = copy.deepcopy(model)
    for at, setting in enumerate(({}, {}, {"target_modules": ["q_proj"]})):
        save_adapter(model, tmp_path / f"a{at}", seed=at, r=8, **setting)
    store = AdapterStore(model, tmp_path, on_ready=bell, device_slots=2)
    first, whole = held(store, bell, "a0", "a1")
    place = first.adapter_index
    first.release()
    (few,) = held(store, bell, "a2")
    assert few.adapter_index == place
    got = stepped(store, model, [(few.adapter_index, IDS[0]), (whole.adapter_index, IDS[1])])
    for one, ids, name in zip(got, IDS, ("a2", "a1"), strict=False):
        expected = peft_logits(stock, tmp_path / name, ids)
        assert (one - expected).abs().max() < 1e-5 * expected.abs().max()
    store.close()


def test_layers_that_a_later_adapter_brings_leave_the_earlier_alone(tmp_path: Path) -> None:
    model, bell = base_model(), Bell()
    stock = copy.deepcopy(model)
    save_adapter(model, tmp_path / "few", seed=1, target_modules=["q_proj"])
    save_adapter(model, tmp_path / "all", seed=2)
    store = AdapterStore(model, tmp_path, on_ready=bell)
    (few,) = held(store, bell, "few")
    held(store, bell, "all")
    (got,) = stepped(store, model, [(few.adapter_index, IDS[0])])
    expected = peft_logits(stock, tmp_path / "few", IDS[0])
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
    store.close()


def test_adapters_kept_in_float32_lose_nothing(tmp_path: Path) -> None:
    model, bell = base_model(), Bell()
    stock = copy.deepcopy(model)
    save_adapter(model, tmp_path / "fine", seed=1, dtype=torch.float32)
    expected = peft_logits(stock, tmp_path / "fine", IDS[0])
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        store = AdapterStore(model, tmp_path, on_ready=bell, dtype=dtype)
        (loan,) = held(store, bell, "fine")
        errors[dtype] = (stepped(store, model, [(loan.adapter_index, IDS[0])])[0] - expected).abs().max()
        store.close()
    assert errors[torch.float32] < 1e-5 * expected.abs().max() < errors[torch.bfloat16]


def test_rows_of_an_adapter_do_not_depend_on_those_beside_it(tmp_path: Path) -> None:
    model, bell = base_model(), Bell()
    for at in range(5):
        save_adapter(model, tmp_path / f"a{at}", seed=at, r=8 + 3 * at)
    store = AdapterStore(model, tmp_path, on_ready=bell)
    indices = [loan.adapter_index for loan in held(store, bell, *(f"a{at}" for at in range(5)))]
    alone = [stepped(store, model, [(index, IDS[0])])[0] for index in indices]
    together = stepped(store, model, [(index, IDS[0]) for index in indices])
    for one, other in zip(alone, together, strict=True):
        assert torch.allclose(one, other, atol=2e-5 * float(one.abs().max()))
    store.close()


def test_outside_a_step_and_after_close_the_model_is_its_own(tmp_path: Path) -> None:
    model, bell = base_model(), Bell()
    plain = model(IDS[:1]).logits
    save_adapter(model, tmp_path / "one", seed=1)
    store = AdapterStore(model, tmp_path, on_ready=bell)
    (loan,) = held(store, bell, "one")
    assert torch.equal(model(IDS[:1]).logits, plain)
    with store.in_step([loan.adapter_index] * 5), torch.no_grad():
        with store.in_step([0] * 5):
            assert torch.equal(model(IDS[:1]).logits, plain)
        assert not torch.allclose(model(IDS[:1]).logits, plain, atol=1e-3)  # the outer step again
        store.close()
        assert torch.equal(model(IDS[:1]).logits, plain)


@pytest.mark.parametrize("announced", [4, 6])
def test_a_pass_with_other_rows_than_announced_is_refused(tmp_path: Path, announced: int) -> None:
    model, bell = base_model(), Bell()
    save_adapter(model, tmp_path / "one", seed=1)
    store = AdapterStore(model, tmp_path, on_ready=bell)
    (loan,) = held(store, bell, "one")
    with (
        store.in_step([loan.adapter_index] * announced),
        torch.no_grad(),
        pytest.raises(InvalidTensor, match=f"5 rows in a step of {announced}"),
    ):
        model(IDS[:1])
    store.close()


def test_a_pass_that_makes_few_logits_gives_each_its_own_adapter_of_the_head(tmp_path: Path) -> None:
    """An engine computes the logits only of the rows from which it samples. Each of these rows must still get its own
    request's adapter of the head."""
    model, bell = base_model(), Bell()
    stock = copy.deepcopy(model)
    save_adapter(model, tmp_path / "head", seed=1, target_modules=["lm_head", "q_proj"])
    save_adapter(model, tmp_path / "other", seed=2)
    save_adapter(model, tmp_path / "third", seed=3, r=16, target_modules=["lm_head"])
    names = ["head", "other", "third", None]
    store = AdapterStore(model, tmp_path, on_ready=bell)
    indices = [loan.adapter_index for loan in held(store, bell, "head", "other", "third")] + [0]
    order = sorted(range(4), key=lambda at: indices[at])
    expected = [
        peft_logits(stock, tmp_path / name, IDS[at]) if name else stock(IDS[at][None]).logits[0]
        for at, name in enumerate(names)
    ]
    ids = torch.stack([IDS[at] for at in order])
    with store.in_step([indices[at] for at in order for _ in range(5)]), torch.no_grad():
        for keep in (1, 3, torch.tensor([1, 4]), 0, torch.tensor([], dtype=torch.int64)):
            logits = model(ids, logits_to_keep=keep).logits
            rows = slice(-keep, None) if isinstance(keep, int) else keep
            for got, at in zip(logits, order, strict=True):
                assert got.shape == expected[at][rows].shape
                assert torch.allclose(got, expected[at][rows], atol=2e-5 * float(expected[at].abs().max()))
        hidden = model.model(ids).last_hidden_state  # a head that is called with rows that nobody announced
        with pytest.raises(InvalidTensor, match="4 rows in a step of 20"):
            model.lm_head(hidden[:, -1:])
    store.close()
    with torch.no_grad():
        assert torch.equal(model(ids, logits_to_keep=1).logits, stock(ids, logits_to_keep=1).logits)


def test_a_step_takes_indices_that_are_held_in_order_only(tmp_path: Path) -> None:
    model, bell = base_model(), Bell()
    for at in range(2):
        save_adapter(model, tmp_path / f"a{at}", seed=at)
    store = AdapterStore(model, tmp_path, on_ready=bell)
    first, second = sorted(held(store, bell, "a0", "a1"), key=lambda loan: loan.adapter_index)
    with pytest.raises(ConfigurationError, match="order"):
        store.in_step([second.adapter_index, first.adapter_index])
    with pytest.raises(ConfigurationError, match="order"):
        store.in_step([first.adapter_index, 0])
    index = second.adapter_index
    second.release()
    for wrong in (index, -1, 10_000):
        with pytest.raises(ConfigurationError, match="no loan holds"):
            store.in_step([wrong])
    store.close()


def test_outputs_that_others_own_are_not_changed() -> None:
    class Given(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return y

    numbers, current, given = AdapterIndices((8,), 8), CurrentStep(), Given()
    layer = AdaptedLayer("layer", given, current)
    stack = Stack(8, 8, (16, 24), torch.float32, torch.device("cpu"))
    layer.stacks[8] = stack
    stack.lora_a.normal_()
    stack.lora_b.normal_()
    stack.adapted.add(1)
    x, indices = torch.randn(6, 16), [numbers.index(8, 1)] * 6
    step = numbers.step(indices, torch.device("cpu"))
    added = x @ stack.lora_a[1].t() @ stack.lora_b[1]
    for y in (torch.randn(6, 24, requires_grad=True), torch.randn(24, 6).t()):
        before = y.detach().clone()
        with current.of(step):
            made = given(x)
        assert torch.allclose(made, before + added, atol=1e-4)
        assert torch.equal(y, before)


@pytest.mark.parametrize("num_adapters", [1, 5])
def test_gradients_pass_through(num_adapters: int) -> None:
    """Five adapters use the grouped product, and one adapter uses plain products."""
    torch.manual_seed(0)
    numbers = AdapterIndices((8,), 8)
    linear, current = torch.nn.Linear(16, 24), CurrentStep()
    layer = AdaptedLayer("layer", linear, current)
    stack = Stack(8, 8, (16, 24), torch.float32, torch.device("cpu"))
    lora_a, lora_b = stack.lora_a.normal_(), stack.lora_b.normal_()
    stack.adapted.update(range(8))
    layer.stacks[8] = stack
    indices = sorted(numbers.index(8, at % num_adapters) for at in range(6))
    x = torch.randn(6, 16, requires_grad=True)
    with current.of(numbers.step(indices, torch.device("cpu"))):
        y = linear(x)
    expected = torch.stack(
        [linear(row) + row @ lora_a[index - 1].t() @ lora_b[index - 1] for row, index in zip(x, indices, strict=True)]
    )
    assert torch.allclose(y, expected, atol=1e-4)
    weight = torch.randn(6, 24)
    (got,) = torch.autograd.grad((y * weight).sum(), x)
    (wanted,) = torch.autograd.grad((expected * weight).sum(), x)
    assert torch.allclose(got, wanted, atol=1e-3)
