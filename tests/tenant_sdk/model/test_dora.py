"""Tests the calls of DoRA over a provider's layers, and what happens if the provider gives false norms or products."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load, save

from attacks.programs.overflow import Fault
from tenant_sdk import TenantClient, embedded, for_remote_base
from tenant_sdk.model.dora import SMALLEST_SHARE, column_norms_of_sum
from tenant_sdk.model.remote_linear import RemoteWeightError
from tenant_sdk.model.run_state import ZEROS, RunState, run_states
from tests.support.false_providers import HONEST, Liar, Opened
from tests.support.lattice import TOY_OPTIONS
from tests.support.parity import adapted, batch, relative
from tests.support.providers import make_served_model
from tests.support.spies import before_requests
from tests.support.tiny_models import make_tiny
from tests.support.training import QUICK, ROWS, lora
from wire.errors import ConfigurationError, NotFinite, VeilbaseError
from wire.frame import Call, Direction, Purpose
from wire.payload import Payload
from wire.transport.inproc import InprocConnection

RANK = 3
GROUPS = {"qkv": 3 * RANK, "o": RANK, "gate and up": 2 * RANK, "down": RANK}
"""The rows of A that each group of a block has."""
Requests = list[tuple[int, Direction, int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("dora") / "model"
    make_tiny("llama", made)
    return made


def client_of(folder: Path, **options: Any) -> TenantClient:
    own = {"mask": "off", "arithmetic": "float", "cache": folder.with_name("cache"), "progress": False}
    return TenantClient(f"inproc:{folder}", **{**own, **options})


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    """Provides a list of the products that are asked for: group, direction and number of rows."""
    seen: Requests = []

    def note(call: Call, payload: Payload) -> None:
        if call.purpose is Purpose.PRODUCT:
            seen.append((call.group, call.direction, payload.num_rows))

    before_requests(monkeypatch, note)
    return seen


def dora_model(client: TenantClient, **changes: Any) -> Any:
    config = lora(r=RANK, use_dora=True, exclude_modules=["lm_head"], **changes)
    return adapted(client.load_model(), for_remote_base(config)).train()


def rows_of_a(requests: Requests) -> list[tuple[int, int]]:
    """Returns (group, number of rows) of the forward requests whose rows are not activations. Requests of activations
    have 24 rows, since a batch of the tests has 24 tokens."""
    return [(group, rows) for group, direction, rows in requests if direction is Direction.FORWARD and rows != 24]


def forward_calls(model: Any, requests: Requests) -> list[tuple[int, int]]:
    requests.clear()
    model(batch(), labels=batch()).loss.backward()
    return rows_of_a(requests)


EXPECTED = list(enumerate([*GROUPS.values(), *GROUPS.values()]))


# ---- when A·W is asked for ------------------------------------------------------------------------------------------


def test_a_group_asks_once_when_a_is_new_and_after_each_step(folder: Path, requests: Requests) -> None:
    with client_of(folder) as client:
        model = dora_model(client)
        assert forward_calls(model, requests) == EXPECTED
        assert len(requests) == 8 + 9 + 8, "the other calls are those of LoRA, forward and backward"
        assert forward_calls(model, requests) == [], "a second batch before the step needs nothing"
        torch.optim.AdamW(model.parameters(), lr=1e-2).step()
        assert forward_calls(model, requests) == EXPECTED
        model.eval()
        with torch.no_grad():
            requests.clear()
            model.generate(input_ids=batch(1, (1, 24)), max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert {rows for _, _, rows in requests} == {24, 1}


@pytest.mark.parametrize("change", ["B is zero", "no gradient", "a learning rate of zero", "behind the version"])
def test_calls_do_not_depend_on_what_a_step_changes(folder: Path, requests: Requests, change: str) -> None:
    with client_of(folder) as client:
        model = get_peft_model(
            client.load_model(),
            for_remote_base(lora(r=RANK, use_dora=True, exclude_modules=["lm_head"])),
        ).train()
        assert forward_calls(model, requests) == EXPECTED
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if change == "no gradient":
            model.zero_grad()
        if change == "behind the version":
            Unversioned(trained).step()
        else:
            torch.optim.SGD(trained, lr=0.0 if change == "a learning rate of zero" else 1e-2).step()
        assert forward_calls(model, requests) == EXPECTED


class Unversioned(torch.optim.Optimizer):
    """Changes parameters through `.data`, as some optimizers do, so that their version does not show it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(1.5)


def test_an_optimizer_behind_the_version_gets_new_norms(folder: Path) -> None:
    with client_of(folder) as client:
        model, again = dora_model(client), dora_model(client)
        model(batch())
        for each in (model, again):
            Unversioned([p for p in each.parameters() if p.requires_grad]).step()
        assert relative(model(batch()).logits, again(batch()).logits) < 1e-6


def test_rows_are_masked_anew_though_a_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.Tensor] = []

    def note(call: Call, payload: Payload) -> None:
        if call.purpose is Purpose.PRODUCT and payload.num_rows == GROUPS["qkv"]:
            sent.append(torch.as_tensor(payload.rows(call)).clone())  # type: ignore[call-overload]

    before_requests(monkeypatch, note)
    options = {**TOY_OPTIONS, "hints": "stream", "background": False}
    with client_of(folder, arithmetic=None, mask="lattice", mask_options=options) as client:
        model = dora_model(client)
        for _ in range(3):
            model(batch(), labels=batch()).loss.backward()
            torch.optim.SGD(model.parameters(), lr=0.0).step()
    numbers = torch.cat([rows.flatten() for rows in sent])
    assert len(sent) == 3 * 2
    assert len({bytes(row.contiguous().numpy()) for rows in sent for row in rows}) == 3 * 2 * GROUPS["qkv"]
    assert abs(float(numbers.double().mean())) < 2**32 / 12**0.5 * 6 / len(numbers) ** 0.5, "uniform, so masked"


def test_dropout_makes_a_second_call_for_each_layer(folder: Path, requests: Requests) -> None:
    with client_of(folder) as client:
        model = dora_model(client, lora_dropout=0.5)
        forward_calls(model, requests)
        forward = [group for group, direction, rows in requests if direction is Direction.FORWARD and rows == 24]
        assert len(forward) == 9 + 14
        model.eval()
        forward_calls(model, requests)
        assert len(requests) == 9 + 8


def test_what_was_asked_in_inference_mode_serves_training(folder: Path, requests: Requests) -> None:
    with client_of(folder) as client:
        model = dora_model(client)
        with torch.inference_mode():
            model(batch())
        assert forward_calls(model, requests) == []


def test_a_copy_has_norms_of_its_own(folder: Path) -> None:
    with client_of(folder) as client:
        model = dora_model(client)
        model(batch())
        other = copy.deepcopy(model)
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                if "lora_" in name:
                    parameter.mul_(2)
        fresh = dora_model(client)
        fresh.load_state_dict(other.state_dict(), strict=False)
        assert relative(other(batch()).logits, fresh(batch()).logits) < 1e-6
        assert relative(model(batch()).logits, dora_model(client)(batch()).logits) < 1e-6


def test_a_pass_without_calls_makes_none_and_leaves_nothing(folder: Path, requests: Requests) -> None:
    with client_of(folder) as client:
        model = dora_model(client)
        requests.clear()
        with torch.no_grad(), run_states(model).products_from(ZEROS):
            model(batch())
        assert requests == []
        assert forward_calls(model, requests) == EXPECTED


# ---- a provider that lies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e300, -1e300, 0.0])
def test_norms_are_positive_and_finite_whatever_is_answered(wrong: float) -> None:
    generator = torch.Generator().manual_seed(1)
    lora_a, lora_b = torch.randn(4, 16, generator=generator), torch.randn(24, 4, generator=generator)
    weight = torch.randn(16, 24, generator=generator)
    weight[:, 3], lora_b[5] = 0, 0
    weight[:, 7] = -0.5 * (lora_b[7] @ lora_a)  # this column of the sum is zero
    norms = weight.norm(dim=0)
    want = (weight.t() + 0.5 * lora_b @ lora_a).norm(dim=1)
    honest = column_norms_of_sum(norms, lora_a @ weight, lora_a, lora_b, 0.5)
    others = torch.arange(24) != 7
    assert relative(honest[others], want[others]) < 1e-6
    own = 0.5 * (lora_b @ lora_a).norm(dim=1)
    lied = column_norms_of_sum(norms, torch.full((4, 24), wrong, dtype=torch.float64), lora_a, lora_b, 0.5)
    for got in (honest, lied):
        assert bool(torch.isfinite(got).all())
        assert bool((got > 0).all())
        assert bool((got <= (norms + own) * (1 + 1e-6)).all())
        assert bool((got >= torch.maximum((norms - own).abs(), SMALLEST_SHARE * (norms + own)) * (1 - 1e-3)).all())
    nothing = column_norms_of_sum(torch.zeros(24), lora_a @ weight, lora_a, torch.zeros(24, 4), 0.5)
    assert bool((nothing > 0).all())


def no_norms(liar: Liar) -> None:
    del liar.files["column_norms.safetensors"]


def write(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Liar], None]:
    def change(liar: Liar) -> None:
        norms = load(liar.files["column_norms.safetensors"])
        norms[name] = value(norms[name])
        liar.files["column_norms.safetensors"] = save(norms)

    return change


def first(number: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda norms: torch.cat([torch.tensor([number]), norms[1:]])


DOWN = "model.layers.1.mlp.down_proj"
FALSE_NORMS: dict[str, tuple[Callable[[Liar], None], str]] = {
    "none": (no_norms, "DoRA needs the norms"),
    "NaN": (write(DOWN, first(math.nan)), f"norms of {DOWN} are no norms"),
    "infinite": (write(DOWN, first(math.inf)), f"norms of {DOWN} are no norms"),
    "negative": (write(DOWN, first(-1.0)), f"norms of {DOWN} are no norms"),
    "larger than the manifest allows": (write(DOWN, lambda norms: norms * 4), f"norms of {DOWN} are no norms"),
    "too few": (write(DOWN, lambda norms: norms[1:].clone()), f"norms of {DOWN} do not fit"),
    "another dtype": (write(DOWN, lambda norms: norms.double()), f"norms of {DOWN} do not fit"),
    "no file": (lambda liar: liar.files.update({"column_norms.safetensors": b"\xff" * 64}), "cannot be read"),
}


@pytest.mark.parametrize(("lie", "text"), FALSE_NORMS.values(), ids=FALSE_NORMS)
def test_false_norms_are_one_line_before_anything_is_sent(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: Callable[[Liar], None], text: str
) -> None:
    liar = Liar(make_served_model(folder, "int8"))
    lie(liar)
    liar.announce()
    monkeypatch.setattr(embedded, "connect_inproc", lambda *_: InprocConnection(liar))
    with client_of(folder, cache=tmp_path / "cache") as client:
        with pytest.raises(VeilbaseError, match=text) as failure:
            dora_model(client)
        assert liar.num_rows == []
        assert "\n" not in str(failure.value)
        adapted(client.load_model(), lora(r=RANK))(batch())  # nothing else needs norms


@pytest.mark.filterwarnings("ignore::tenant_sdk.model.run_state.NotFiniteWarning")
@pytest.mark.parametrize("mask", ["off", "lattice"])
@pytest.mark.parametrize("after", [0, 9])
def test_a_lie_in_a_product_shows_in_no_call(opened: Opened, tmp_path: Path, mask: str, after: int) -> None:
    """With `after` 0, the lie hits A·W of the first layer. With 9, it hits the second optimizer step."""
    wrong = math.nan if mask == "off" else 2.0**31
    seen = []
    for fault in (HONEST, Fault(Direction.FORWARD, wrong, after)):
        client, provider = opened(fault, mask)
        config = lora(r=RANK, use_dora=True)
        fails = fault is not HONEST and mask == "off"  # in ring arithmetic a wrong number is finite
        with pytest.raises(NotFinite, match=r"^[^\n]*$") if fails else contextlib.nullcontext():
            client.finetune(ROWS, config, tmp_path / f"out{len(seen)}", **{**QUICK, "max_steps": 3})
        seen.append(provider.seen)
    assert len(seen[0]) > 0
    assert seen[0] == seen[1]


@pytest.mark.filterwarnings("ignore::tenant_sdk.model.run_state.NotFiniteWarning")
@pytest.mark.parametrize("after", [0, 3, 30], ids=["in A·W", "in the first pass", "in a later pass"])
def test_a_second_answer_does_not_show_whether_the_first_was_spoilt(opened: Opened, tmp_path: Path, after: int) -> None:
    """Every answer asks for A·W, whatever the answers before it were. Otherwise the second answer of a session would
    ask for it only if a value of the first one was not finite, which may depend on the first prompt."""
    client, provider = opened()
    client.finetune(ROWS, lora(r=RANK, use_dora=True), tmp_path / "dora", **{**QUICK, "max_steps": 1})
    answers = []
    for fails in (False, False, True, False):
        fault = Fault(Direction.FORWARD, math.nan, provider.num_matching + after) if fails else HONEST
        provider.fault, provider.seen = fault, []
        with pytest.raises(NotFinite) if fails else contextlib.nullcontext():
            client.generate("who?", tmp_path / "dora", 4, fixed_length=True)
        answers.append(provider.seen)
    assert len(answers[0]) > 0
    assert all(each == answers[0] for each in answers)


def test_answers_at_a_time_ask_once_each(folder: Path, requests: Requests) -> None:
    """Two runs that alternate, as those of two threads may, do not take A·W from each other."""
    with client_of(folder) as client, torch.no_grad():
        model = dora_model(client).eval()
        states = run_states(model)
        runs = [RunState(may_stop=False), RunState(may_stop=False)]
        for run in runs * 2:
            with states.within(run):
                model(batch())
        assert rows_of_a(requests) == EXPECTED * 2


def test_norms_of_a_spoilt_answer_are_not_those_of_the_next(folder: Path, requests: Requests) -> None:
    """In a run that sends zeros, A·W is zeros, too. A later run must ask again."""
    with client_of(folder) as client:
        model = dora_model(client).eval()
        with torch.no_grad():
            with run_states(model).own(may_stop=False) as run:
                run.outcome.sends_zeros = True
                model(batch())
                first_calls = rows_of_a(requests)
                model(batch())
                assert rows_of_a(requests) == first_calls == EXPECTED, "a spoilt run makes the calls of any other"
            got = model(batch()).logits
        assert relative(got, dora_model(client).eval()(batch()).logits) < 1e-6


# ---- PEFT ------------------------------------------------------------------------------------------------------------


def test_configs_that_need_nothing_are_returned_as_they_are() -> None:
    for config in (IA3Config(task_type="CAUSAL_LM"), lora()):
        assert for_remote_base(config) is config
    config = lora(use_dora=True)
    made = for_remote_base(config)
    assert made is not config
    assert made.to_dict() == config.to_dict()
    assert config._custom_modules is None


def test_stock_peft_alone_and_merging_are_refused(folder: Path) -> None:
    with client_of(folder) as client:
        with pytest.raises(RemoteWeightError, match="for_remote_base"):
            get_peft_model(client.load_model(), LoraConfig(use_dora=True, target_modules=["q_proj"]))
        model = dora_model(client)
        with pytest.raises(ConfigurationError, match="stays with the provider"):
            model.merge_and_unload()


def test_an_adapter_that_is_deleted_and_made_again(folder: Path, requests: Requests) -> None:
    with client_of(folder) as client:
        model = dora_model(client)
        model(batch())
        model.add_adapter("other", for_remote_base(lora(r=2, use_dora=True, target_modules=["q_proj"])))
        model.delete_adapter("other")
        assert forward_calls(model, requests) == []
        model.add_adapter("other", for_remote_base(lora(r=2, use_dora=True, target_modules=["o_proj"])))
        model.set_adapter("other")
        assert forward_calls(model, requests) == [(1, 2), (5, 2)]
