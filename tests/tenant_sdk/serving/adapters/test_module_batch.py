"""Tests that adapters of one kind and with the same settings are computed in one call, with the results of each
alone."""

from __future__ import annotations

import copy
import gc
import shutil
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file, save_file
from torch import nn

from tenant_sdk.serving.adapters import AdapterStore, module_stack
from tenant_sdk.serving.adapters.module_stack import Batching, ModuleBatch, RowFormat
from tenant_sdk.serving.adapters.peft_modules import base_inputs, outputs, stub_of
from tests.support.saved_adapters import EXAMPLES, OF_CONV1D, Bell, base_model, held, save_adapter, save_kind
from wire.errors import InvalidTensor

pytestmark = pytest.mark.filterwarnings("ignore:fan_in_fan_out is set")
LENGTHS = (2, 3, 2, 2, 2, 1)
"""The numbers of rows of six adapters of one kind in a step. The four with two rows each are computed together, though
their rows are not in one piece."""
ONE_BY_ONE = (
    "LoHa", "LoKr", "LoKr of two products", "FourierFT", "WaveFT", "BOFT", "BOFT of two factors", "HRA",
    "HRA, orthogonal",  # They make matrices of the layer's size.
    "RandLoRA", "RandLoRA without its bases", "C3A",  # torch's vmap refuses their functions.
)  # fmt: skip
"""The examples whose adapters are computed one after the other."""
FIXED = (
    "vera_A", "vera_B", "randlora_A", "randlora_B", "tinylora_A", "tinylora_B", "tinylora_P", "delora_w_norm",
)  # fmt: skip
"""Parts of the names of tensors that training does not change."""
NUM_LAYERS = 6
"""The number of layers that an example changes: three in each of two blocks."""
ROUNDING = 1e-5
"""The largest difference of logits, relative to the largest logit: sums in another order, in float32."""
FORMAT = RowFormat(4, 3, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module", params=("llama", "gpt2"))
def stock(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, base_model(request.param)


def save_several(model: Any, kind: str, root: Path, title: str, count: int = len(LENGTHS)) -> list[str]:
    """Saves adapters of one kind that differ in their numbers only, and returns their names."""
    save_kind(model, kind, root / "a0", title, seed=1)
    names = [f"a{number}" for number in range(count)]
    for number, name in enumerate(names[1:], start=1):
        shutil.copytree(root / "a0", root / name)
        path = root / name / SAFETENSORS_WEIGHTS_NAME
        save_file(
            {key: one * (1 + number / 7) if trained(key, one) else one for key, one in load_file(path).items()}, path
        )
    return names


def trained(key: str, one: torch.Tensor) -> bool:
    """Returns whether training changes a tensor of a file. What it does not change is equal in all adapters."""
    return one.is_floating_point() and not any(part in key for part in FIXED)


def logits_of(
    store: AdapterStore, model: Any, indices: Sequence[int], lengths: Sequence[int] = LENGTHS
) -> torch.Tensor:
    rows = sorted(index for index, length in zip(indices, lengths, strict=True) for _ in range(length))
    ids = torch.arange(3, 3 + len(rows))[None]
    with torch.no_grad(), store.in_step(rows):
        logits: torch.Tensor = model(ids).logits[0]
    return logits


def alone(
    monkeypatch: pytest.MonkeyPatch, store: AdapterStore, model: Any, indices: Sequence[int],
    lengths: Sequence[int] = LENGTHS,
) -> torch.Tensor:  # fmt: skip
    """Returns the logits if no adapters are computed together, as test_kinds.py compares them with PEFT."""
    with monkeypatch.context() as patch:
        patch.setattr(module_stack, "MOST_ALONE", 1000)
        return logits_of(store, model, indices, lengths)


@pytest.mark.parametrize("title", EXAMPLES)
def test_adapters_of_a_kind_are_computed_together(
    title: str, stock: tuple[str, Any], tmp_path: Path, batch_calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, base = stock
    if kind == "gpt2" and title not in OF_CONV1D:
        pytest.skip("PEFT has no layer of this kind for Conv1D")
    names = save_several(base, kind, tmp_path, title)
    save_adapter(base, tmp_path / "lora", seed=3, fan_in_fan_out=kind == "gpt2")
    bell, model = Bell(), copy.deepcopy(base)
    store = AdapterStore(model, tmp_path, on_ready=bell, separate_calls=True)
    indices = [loan.adapter_index for loan in held(store, bell, *names, "lora")]
    expected = alone(monkeypatch, store, model, [*indices, 0], (*LENGTHS, 2, 2))
    batch_calls.clear()
    got = logits_of(store, model, [*indices, 0], (*LENGTHS, 2, 2))
    store.close()
    assert (got - expected).abs().max() < ROUNDING * expected.abs().max()
    assert batch_calls == ([] if title in ONE_BY_ONE else [4] * NUM_LAYERS)


def test_an_adapter_that_takes_a_place_over_is_computed_with_its_own_numbers(
    tmp_path: Path, batch_calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_model("llama")
    names = save_several(base, "llama", tmp_path, "VB-LoRA", count=6)
    bell, model = Bell(), copy.deepcopy(base)
    store = AdapterStore(model, tmp_path, on_ready=bell, device_slots=5)
    loans = held(store, bell, *names[:5])
    lengths = (1,) * 5
    first = logits_of(store, model, [loan.adapter_index for loan in loans], lengths)
    index, replaced = loans[2].adapter_index, loans.pop(2)
    replaced.release()
    loans += held(store, bell, names[5])
    assert loans[-1].adapter_index == index
    indices = [loan.adapter_index for loan in loans]
    got = logits_of(store, model, indices, lengths)
    expected = alone(monkeypatch, store, model, indices, lengths)
    store.close()
    assert (got - expected).abs().max() < ROUNDING * expected.abs().max()
    assert (got - first).abs().max() > 1e-3  # The other adapter matters.
    assert batch_calls == [5] * 2 * NUM_LAYERS


def test_adapters_of_other_settings_are_not_computed_with_these(tmp_path: Path, batch_calls: list[int]) -> None:
    base = base_model("llama")
    names = save_several(base, "llama", tmp_path, "MiSS", count=3)
    save_kind(base, "llama", tmp_path / "other", "MiSS", seed=9, target_modules=["q_proj"])
    bell, model = Bell(), copy.deepcopy(base)
    store = AdapterStore(model, tmp_path, on_ready=bell)
    indices = [loan.adapter_index for loan in held(store, bell, *names, "other")]
    batch_calls.clear()
    logits_of(store, model, indices, (1,) * 4)
    store.close()
    assert batch_calls == []


def test_adapters_with_other_projections_are_computed_with_theirs(
    tmp_path: Path, batch_calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = base_model("llama")
    names = save_several(base, "llama", tmp_path, "VeRA", count=9)
    for name in names[2:6]:
        change_projections(tmp_path / name)
    bell, model = Bell(), copy.deepcopy(base)
    store = AdapterStore(model, tmp_path, on_ready=bell)
    indices = [loan.adapter_index for loan in held(store, bell, *names)]
    expected = alone(monkeypatch, store, model, indices, (2,) * 9)
    got = logits_of(store, model, indices, (2,) * 9)
    store.close()
    assert (got - expected).abs().max() < ROUNDING * expected.abs().max()
    assert batch_calls == [5, 4] * NUM_LAYERS


def change_projections(folder: Path) -> None:
    path = folder / SAFETENSORS_WEIGHTS_NAME
    save_file({key: one if trained(key, one) else one * 1.5 for key, one in load_file(path).items()}, path)


@pytest.mark.parametrize("at", [0, 2])
def test_equal_projections_are_kept_once(tmp_path: Path, at: int) -> None:
    """One of four adapters, the first or another, has other projections than the rest."""
    base = base_model("llama")
    names = save_several(base, "llama", tmp_path, "VeRA", count=4)
    change_projections(tmp_path / names[at])
    bell, model = Bell(), copy.deepcopy(base)
    store = AdapterStore(model, tmp_path, on_ready=bell)
    modules = []
    put = ModuleBatch.put

    def noted(batch: ModuleBatch, place: int, module: nn.Module) -> None:
        put(batch, place, module)
        modules.append(module)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModuleBatch, "put", noted)
        held(store, bell, *names)
    store.close()
    assert len(modules) == 4 * NUM_LAYERS
    for name in ("vera_A", "vera_B"):
        assert len({getattr(module, name)["default"].data_ptr() for module in modules}) == 2
    assert len({module.vera_lambda_b["default"].data_ptr() for module in modules}) == 4 * NUM_LAYERS  # type: ignore[index,union-attr]


# ---- the trial ------------------------------------------------------------------------------------------------------


def is_batched(x: torch.Tensor) -> bool:
    """Returns whether vmap computes with x, which then has no memory of its own."""
    try:
        return x.data_ptr() == 0
    except RuntimeError:
        return True


class Scaled(nn.Module):
    """Plays a module of PEFT that multiplies its input by `before` and the result by `after`."""

    def __init__(self, before: float = 1.0, after: float = 2.0) -> None:
        super().__init__()
        self.before, self.after = nn.Parameter(torch.tensor(before)), nn.Parameter(torch.tensor(after))
        self.base_layer = stub_of(nn.Linear(4, 3), (4, 3), torch.float32, torch.device("cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.base_layer(x * self.before) * self.after
        return made


class Branching(Scaled):
    """Has a branch that depends on numbers, which vmap refuses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if self.before > 0 else -x)


class Squared(Scaled):
    """Multiplies its result by `after` once more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.after


class Failing(Scaled):
    """Raises an error in a batch that torch would not raise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if is_batched(x):
            raise KeyError("planted")
        return super().forward(x)


class Wrong(Scaled):
    """Gives other numbers in a batch than alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.1 if is_batched(x) else 1.0)


class Loose(Scaled):
    """Has a tensor that is not registered, so that a batch would use one adapter's tensor for all."""

    def __init__(self, before: float) -> None:
        super().__init__(before)
        self.numbers = {"default": torch.tensor(before)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.numbers["default"]


class Unregistered(Scaled):
    """Has a number that is no tensor, so that a batch would use one adapter's number for all."""

    def __init__(self, before: float) -> None:
        super().__init__(before)
        self.number = before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.number


def batch_of(*modules: nn.Module, rows: RowFormat = FORMAT) -> ModuleBatch:
    made = ModuleBatch(rows, Batching(), "alike")
    for place, module in enumerate(modules):
        made.put(place, module)
    return made


def test_a_batch_works_after_a_trial_of_two_modules() -> None:
    assert batch_of(Scaled()).group(0) is None
    assert batch_of(Scaled(1.0), Scaled(3.0)).group(1) is not None


RUNS: list[bool] = []
"""For each run of a `Counted` module, whether vmap computed it."""


class Counted(Scaled):
    """Notes its runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        RUNS.append(is_batched(x))
        return super().forward(x)


def test_modules_that_are_alike_have_one_trial() -> None:
    batching = Batching()
    for at in range(3):
        RUNS.clear()
        batch = ModuleBatch(FORMAT, batching, "alike")
        for place in range(2):
            batch.put(place, Counted(1.0 + at + place))
        assert batch.group(0) is not None
        assert (True in RUNS) is (at == 0)


@pytest.mark.parametrize("kind", [Branching, Failing, Wrong, Loose, Unregistered])
def test_a_trial_refuses_what_cannot_be_computed_together(kind: type[Scaled]) -> None:
    assert batch_of(kind(1.0), kind(3.0)).group(1) is None
    assert batch_of(kind(1.0), kind(1.0)).group(1) is None or kind is Unregistered


def test_a_trial_in_bf16_is_not_looser_than_its_rounding() -> None:
    rows = RowFormat(4, 3, torch.bfloat16, torch.device("cpu"))
    assert batch_of(Scaled(1.0).bfloat16(), Scaled(3.0).bfloat16(), rows=rows).group(1) is not None
    assert batch_of(Wrong(1.0).bfloat16(), Wrong(3.0).bfloat16(), rows=rows).group(1) is None


def test_a_later_module_of_another_setting_is_computed_alone() -> None:
    batch = batch_of(Unregistered(1.0), Unregistered(1.0), Unregistered(3.0))
    assert [batch.group(place) is not None for place in range(3)] == [True, True, False]


def test_a_trial_counts_for_the_settings_that_it_had() -> None:
    batching = Batching()
    for numbers, way in (((1.0, 1.0), True), ((1.0, 1.0), True), ((3.0, 3.0), True), ((3.0, 1.0), False)):
        batch = ModuleBatch(FORMAT, batching, "alike")
        for place, number in enumerate(numbers):
            batch.put(place, Unregistered(number))
        assert (batch.group(1) is not None) is way


def test_an_adapters_numbers_do_not_decide_for_others() -> None:
    """The first module's numbers overflow, and those of the second change nothing."""
    batch = batch_of(Squared(1.0, 3e38), Squared(1.0, 1.0), Squared())
    assert [batch.group(place) is not None for place in range(3)] == [True, True, True]
    wrong = batch_of(Wrong(1.0, 0.0), Wrong(1.0, 0.0), Wrong())
    assert [wrong.group(place) for place in range(3)] == [None, None, None]


@pytest.mark.parametrize("odd", [threading.Lock(), numpy.ones(2), [numpy.ones(2)]])
def test_a_module_that_cannot_be_judged_is_computed_alone(odd: Any) -> None:
    modules = [Scaled() for _ in range(3)]
    for module in modules:
        module.odd = odd  # type: ignore[assignment]
    batch = batch_of(*modules)
    assert [batch.group(place) for place in (1, 2)] == [None, None]


def test_a_module_whose_trial_fails_leaves_nothing_in_a_stack() -> None:
    stack = module_stack.ModuleStack()
    kept = []
    for place in range(2):
        module = Failing(1.0 + place)
        kept.append(weakref.ref(module))
        stack.put(place, module, False, "settings", partial(ModuleBatch, FORMAT, Batching()))
        del module
    assert stack.adapted == {0, 1}
    for place in range(2):
        stack.clear(place)
    gc.collect()
    assert [each() for each in kept] == [None, None]


def test_a_tensor_that_layers_share_is_stacked_once() -> None:
    batching, shared = Batching(), [torch.randn(3), torch.randn(3)]
    stacked = batching.stack(shared)
    assert batching.stack(shared) is stacked
    assert torch.equal(stacked.tensor, torch.stack(shared))
    assert batching.stack(shared[::-1]) is not stacked
    kept = weakref.ref(stacked)
    del stacked
    assert kept() is None, "the stack goes with the last layer that uses it"


def test_a_batch_computes_what_each_module_computes_alone() -> None:
    modules = [Scaled(1.0 + at, 2.0 - at) for at in range(5)]
    batch, rows, given = batch_of(*modules), torch.randn(5, 2, 4), torch.randn(5, 2, 3)
    with torch.no_grad():
        inputs = batch.base_inputs(modules, rows)
        got = batch.outputs(modules, rows, given, inputs)
        for at, module in enumerate(modules):
            assert torch.equal(inputs[at], base_inputs(module, rows[at]))
            assert torch.equal(got[at], outputs(module, rows[at], given[at], inputs[at]))


def test_a_call_with_other_rows_than_the_layer_got_is_an_error() -> None:
    modules = [Scaled(1.0 + at) for at in range(2)]
    batch, rows = batch_of(*modules), torch.randn(2, 2, 4)
    with torch.no_grad(), pytest.raises(InvalidTensor, match="other rows"):
        batch.outputs(modules, rows, torch.randn(2, 2, 3), rows)


def test_rows_that_are_not_finite_stay_the_adapters_own() -> None:
    modules = [Scaled(1.0) for _ in range(4)]
    batch, rows, given = batch_of(*modules), torch.randn(4, 2, 4), torch.randn(4, 2, 3)
    rows[1], given[1] = torch.nan, torch.nan
    with torch.no_grad():
        got = batch.outputs(modules, rows, given, rows)
    assert torch.isfinite(got[[0, 2, 3]]).all()
    assert torch.isnan(got[1]).all()


def test_removed_modules_leave_nothing_in_a_batch() -> None:
    modules = [Scaled(1.0 + at) for at in range(2)]
    batch = batch_of(*modules)
    with torch.no_grad():
        batch.base_inputs(modules, torch.randn(2, 2, 4))
    kept = [weakref.ref(module.before) for module in modules]
    batch.remove(0)
    batch.remove(1)
    del modules
    gc.collect()
    assert [each() for each in kept] == [None, None]
    assert len(batch) == 0


# ---- OFT within bounds ----------------------------------------------------------------------------------------------


def test_numbers_that_oft_moves_within_bounds_stay_where_they_are(tmp_path: Path, batch_calls: list[int]) -> None:
    """PEFT moves them in every run, and a second run for the same rows would differ from the first by rounding."""
    base = base_model("llama")
    for number in range(5):
        save_kind(base, "llama", tmp_path / f"a{number}", "OFT within bounds", seed=number, eps=0.05)
    bell, model = Bell(), copy.deepcopy(base)
    store = AdapterStore(model, tmp_path, on_ready=bell, separate_calls=True)
    indices = [loan.adapter_index for loan in held(store, bell, *(f"a{number}" for number in range(5)))]
    first = logits_of(store, model, indices, (1,) * 5)
    for _ in range(8):
        assert torch.equal(logits_of(store, model, indices, (1,) * 5), first)
    store.close()
    assert batch_calls == [5] * 9 * NUM_LAYERS


def test_a_module_that_changes_its_own_numbers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenant_sdk.serving.adapters.peft_modules._end_projection", lambda _: None)
    base, bell = base_model("llama"), Bell()
    save_kind(base, "llama", tmp_path / "a", "OFT within bounds", seed=1)
    store = AdapterStore(base, tmp_path, on_ready=bell, separate_calls=True)
    loan = store.reserve("a")
    bell.wait_for(loan)
    store.close()
    assert "changes its own numbers" in str(loan.failure)
