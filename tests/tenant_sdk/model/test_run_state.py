"""Tests numbers that become NaN or infinite. The run makes all planned calls and fails only at its end, so that the
provider does not see when this happened. With `verify`, the run stops at once."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

from attacks.programs.overflow import Fault, Overflower, Seen
from noise.blocks.pool import MaskPool
from noise.masks.lattice import Lattice
from noise.masks.off import Off
from noise.scheme import GroupSpec
from provider.model.served_model import ServedModel
from tenant_sdk import TenantClient
from tenant_sdk.model.run_state import FAILED, NotFiniteWarning, are_finite, check_run, run_states
from tenant_sdk.model.send import RemoteExecutor
from tests.support.false_providers import HONEST, Opened
from tests.support.providers import make_served_model
from tests.support.spies import before_requests
from tests.support.training import QUICK, ROWS, lora
from wire.errors import ConfigurationError, InvalidTensor, NotFinite, Unavailable
from wire.frame import Arithmetic, Call, Direction
from wire.limits import Limits
from wire.transport.inproc import InprocConnection

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def train(client: TenantClient, out: Path, **changes: Any) -> Any:
    return client.finetune(ROWS, lora(r=2), out, **{**QUICK, "max_steps": 3, "save_steps": 1, **changes})


def honest_calls(opened: Opened, out: Path, mask: str = "off", **changes: Any) -> list[Seen]:
    client, provider = opened(HONEST, mask)
    train(client, out, **changes)
    return provider.seen


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_checkpointing": True},
        {"checkpointing": "replies", "memory_budget_mb": 0},
        {"batch_size": 2, "gradient_accumulation_steps": 2},
        {"max_grad_norm": 0.0},
    ],
    ids=["plain", "recomputed", "replies", "accumulated", "unclipped"],
)
def test_a_run_makes_the_calls_of_an_honest_one_and_fails_once(
    opened: Opened, tmp_path: Path, changes: dict[str, Any]
) -> None:
    expected = honest_calls(opened, tmp_path / "honest", **changes)
    for direction in (FORWARD, BACKWARD):
        num_products = sum(call[1:3] == ("PRODUCT", direction.name) for call in expected)
        for first in (0, num_products // 3):
            client, provider = opened(Fault(direction, math.nan, first))
            with pytest.warns(NotFiniteWarning) as warned, pytest.raises(NotFinite, match="nothing came of this run"):
                train(client, tmp_path / "out", resume=False, **changes)
            assert provider.seen == expected, f"{direction.name}, from product {first} on"
            assert len([each for each in warned if each.category is NotFiniteWarning]) == 1
            assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mask", ["gaussian-pool", "lattice"])
def test_whatever_the_mask(opened: Opened, tmp_path: Path, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls are compared, including requests for hints. The infinity comes from the tenant's own code, since
    replies under the lattice mask are integers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = honest_calls(opened, tmp_path / "honest", mask)
        client, provider = opened(HONEST, mask)
        _break_product(monkeypatch, number=7)
        with pytest.raises(NotFinite, match="nothing came of this run"):
            train(client, tmp_path / "out")
    assert provider.seen == expected


def _break_product(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Makes one call, the one with this number counted from 1, return infinite and NaN values, as after an overflow."""
    run, counted = RemoteExecutor.run, [0]

    def broken(*arguments: Any) -> torch.Tensor:
        counted[0] += 1
        product = run(*arguments)
        return product * math.inf if counted[0] == number else product

    monkeypatch.setattr(RemoteExecutor, "run", broken)


def test_zeros_go_out_under_fresh_slots(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = opened(HONEST, "lattice")
    model: Any = client.load_model()
    given: list[torch.Tensor] = []
    sent: list[torch.Tensor] = []
    mask, take = Lattice.mask, MaskPool.take

    def spy(scheme: Lattice, group: Any, direction: Direction, rows: torch.Tensor) -> Any:
        given.append(rows)
        return mask(scheme, group, direction, rows)

    def spy_take(*args: Any) -> Any:
        taken = take(*args)
        sent.append(taken[0].clone())
        return taken

    monkeypatch.setattr(Lattice, "mask", spy)
    monkeypatch.setattr(MaskPool, "take", spy_take)
    layer = model.model.layers[0].self_attn.o_proj
    x = torch.ones(3, layer.in_features)
    with pytest.warns(NotFiniteWarning):
        assert not layer(x * math.nan).any()
    assert not layer(x).any(), "it stays so"
    assert [bool(rows.isnan().any()) for rows in given] == [True, False, False]
    assert not given[1].any()
    assert not given[2].any()
    assert len(sent) == 2, "what is refused burns no row"
    assert not torch.equal(sent[0], sent[1])


def test_a_call_in_parts_sends_all_of_them(opened: Opened, chat_folder: Path) -> None:
    limits = Limits().model_copy(update={"max_rows": 4})
    client, provider = opened(HONEST, served_model=make_served_model(chat_folder, "int8", limits))
    layer: Any = client.load_model().model.layers[0].self_attn.o_proj
    x = torch.ones(10, layer.in_features)
    layer(x)
    expected, provider.seen = provider.seen, []
    x[5, 0] = math.inf
    with pytest.warns(NotFiniteWarning):
        assert not layer(x).any()
    assert [rows for *_, rows in expected] == [4, 4, 2]
    assert provider.seen == expected


def test_one_row_takes_its_own_way(opened: Opened) -> None:
    client, provider = opened(HONEST, "lattice")
    layer: Any = client.load_model().model.layers[0].self_attn.o_proj
    with torch.no_grad(), pytest.warns(NotFiniteWarning):
        assert not layer(torch.full((1, layer.in_features), math.nan)).any()
    assert [(call[1], call[3]) for call in provider.seen if call[1] == "PRODUCT"] == [("PRODUCT", 1)]


def test_the_last_gradient_is_looked_at_too(opened: Opened, tmp_path: Path) -> None:
    """A NaN in the last gradient of a run makes the run fail, too. No later row would contain it, but the adapter
    would."""
    num_backward = sum(direction == "BACKWARD" for *_, direction, _ in honest_calls(opened, tmp_path / "honest"))
    client, _ = opened(Fault(BACKWARD, math.nan, num_backward - 1))
    with pytest.warns(NotFiniteWarning), pytest.raises(NotFinite):
        train(client, tmp_path / "out")


def test_with_verify_it_stops_at_once(opened: Opened, chat_folder: Path, tmp_path: Path) -> None:
    client, provider = opened(HONEST, arithmetic="ring", verify=chat_folder)
    model: Any = client.load_model()
    with pytest.raises(NotFinite, match="nothing was sent"):
        model(inputs_embeds=torch.full((1, 4, 32), math.nan))
    assert provider.seen == []


def test_a_call_that_belongs_to_no_model_stops_at_once(served_model: ServedModel) -> None:
    provider, info = Overflower(served_model, HONEST), served_model.manifest().groups[0]
    executor = RemoteExecutor([InprocConnection(provider)], Off(Arithmetic.FLOAT), Limits())
    group = GroupSpec(info.id, info.in_features, info.out_features, 1.0, 1.0, torch.ones(info.out_features))
    assert executor.run(group, FORWARD, torch.ones(2, info.in_features)).isfinite().all()
    provider.seen = []
    with pytest.raises(InvalidTensor, match="nothing was sent"):
        executor.run(group, FORWARD, torch.full((2, info.in_features), math.nan))
    assert provider.seen == []


def test_a_refusal_of_the_providers_is_an_error_as_ever(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that the provider sends is raised at once; only values that are NaN or infinite are reported at the
    end."""
    client, _ = opened(HONEST)
    model: Any = client.load_model()

    def refuse(*_: Any) -> None:
        raise InvalidTensor("refused")

    before_requests(monkeypatch, refuse)
    with pytest.raises(InvalidTensor, match="refused"):
        model(torch.ones(1, 4, dtype=torch.long))


def test_warnings_that_are_errors_do_not_end_the_run(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = honest_calls(opened, tmp_path / "honest")
    client, provider = opened(Fault(FORWARD, math.nan, 5))
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error", NotFiniteWarning)
        with pytest.raises(NotFinite):
            train(client, tmp_path / "out")
    assert provider.seen == expected
    assert "this model sends zeros from now on" in caplog.text


def test_a_later_run_of_the_same_client_starts_afresh(opened: Opened, tmp_path: Path) -> None:
    client, provider = opened(Fault(FORWARD, math.nan))
    with pytest.warns(NotFiniteWarning), pytest.raises(NotFinite):
        train(client, tmp_path / "out")
    provider.fault = HONEST
    assert train(client, tmp_path / "other").adapter_dir.is_dir()
    assert isinstance(client.generate("who?", max_new_tokens=2), str)


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def markers(folder: Path) -> dict[str, list[str]]:
    """Returns, for each checkpoint, which of the marker files `complete` and `not-finite` it has."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    names = ("complete", "not-finite")
    return {path.name: [name for name in names if (path / name).exists()] for path in found}


def test_saves_go_on_and_none_of_the_run_is_resumed_from(opened: Opened, tmp_path: Path) -> None:
    seen = honest_calls(opened, tmp_path / "honest")
    first = sum(call[2] == "FORWARD" for call in seen) // 2  # in the second of three steps
    client, provider = opened(Fault(FORWARD, math.nan, first))
    with pytest.warns(NotFiniteWarning), pytest.raises(NotFinite):
        train(client, tmp_path / "out")
    folder = tmp_path / ".out.checkpoints"
    assert markers(folder) == {"checkpoint-2": ["not-finite"], "checkpoint-3": ["not-finite"]}
    weights = load_file(folder / "checkpoint-3" / "adapter_model.safetensors")
    assert are_finite(weights.values()), "some PEFT methods would raise on weights that are not"
    provider.seen, provider.fault = [], HONEST
    for resume in (None, True):
        with pytest.raises(ConfigurationError, match="NaN or infinite value: none of them is resumed from; pass resum"):
            train(client, tmp_path / "out", resume=resume)
    assert provider.seen == []
    assert train(client, tmp_path / "out", resume=False).resumed_from_step == 0
    assert not folder.exists()


def test_a_run_cut_after_a_spoilt_save_is_not_resumed_from_an_earlier_one(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a NaN, the next checkpoint is marked `not-finite`, and then the provider cuts the run off. No earlier
    checkpoint may be resumed, since the step at which it goes on would show the provider when the NaN appeared."""
    seen = honest_calls(opened, tmp_path / "honest")
    a_step = len(seen) // 3
    client, _ = opened(Fault(FORWARD, math.nan, sum(call[2] == "FORWARD" for call in seen) // 2))
    counted = [0]

    def break_off(*_: Any) -> None:
        counted[0] += 1
        if counted[0] > 2 * a_step + 3:
            raise Unavailable("the provider is gone")

    with monkeypatch.context() as patch:
        before_requests(patch, break_off)
        with pytest.warns(NotFiniteWarning), pytest.raises(Unavailable):
            train(client, tmp_path / "out")
    assert markers(tmp_path / ".out.checkpoints") == {"checkpoint-1": ["complete"], "checkpoint-2": ["not-finite"]}
    with pytest.raises(ConfigurationError, match="none of them is resumed from"):
        train(client, tmp_path / "out")


@pytest.mark.filterwarnings("ignore::tenant_sdk.ProviderAwayWarning")
@pytest.mark.parametrize("cut_after", [1.5, 2.5], ids=["before a spoilt save", "after it"])
def test_a_run_that_waits_makes_the_same_calls_after_a_nan(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_after: float
) -> None:
    """A provider may send a NaN, cut the run off and come back: the step from which the run goes on, and all its calls,
    must not show whether the NaN made a difference."""
    a_step = len(honest_calls(opened, tmp_path / "honest")) // 3

    def calls_with(fault: Fault, out: Path) -> tuple[list[Seen], str]:
        client, provider = opened(fault)
        counted, end = [0], ""

        def cut_once(*_: Any) -> None:
            counted[0] += 1
            if counted[0] == int(cut_after * a_step):
                provider.fault = HONEST
                raise Unavailable("the provider is gone")

        with monkeypatch.context() as patch:
            before_requests(patch, cut_once)
            try:
                assert train(client, out, provider_wait_s=60).num_waits == 1
            except NotFinite:
                end = "not finite"
        return provider.seen, end

    expected, honest_end = calls_with(HONEST, tmp_path / "sound")
    num_forward = sum(call[2] == "FORWARD" for call in expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotFiniteWarning)
        seen, end = calls_with(Fault(FORWARD, math.nan, num_forward * 3 // 8), tmp_path / "out")
    assert seen == expected
    assert honest_end == ""
    assert end == ("not finite" if cut_after > 2 else ""), "a sound checkpoint makes the run sound again"


def test_a_value_after_the_last_save_spoils_the_whole_folder(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a NaN appears after the last checkpoint was saved, none of the checkpoints may be resumed. The step at which
    the run goes on would show the provider when the NaN appeared."""
    client, _ = opened(HONEST)
    calls = [0]

    def trainable(model: Any) -> Iterator[torch.Tensor]:
        calls[0] += 1  # of three saves and the end
        return iter((torch.tensor(math.nan if calls[0] > 3 else 0.0),))

    monkeypatch.setattr("tenant_sdk.training.finetune.trainable", trainable)
    with pytest.warns(NotFiniteWarning), pytest.raises(NotFinite):
        train(client, tmp_path / "out")
    assert markers(tmp_path / ".out.checkpoints") == {"checkpoint-2": ["complete"], "checkpoint-3": ["complete"]}
    with pytest.raises(ConfigurationError, match="none of them is resumed from"):
        train(client, tmp_path / "out")


# ---- a stock Trainer ------------------------------------------------------------------------------------------------


def stock(client: TenantClient, out: Path) -> Any:
    model: Any = get_peft_model(client.load_model(), lora(r=2))  # type: ignore[arg-type]
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=3, per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no",
        disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    rows = [{"input_ids": [5, 6, 7, 8 + row], "labels": [5, 6, 7, 8 + row]} for row in range(8)]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    return model


@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_a_stock_trainer_goes_on_to_its_end_and_is_told(opened: Opened, tmp_path: Path, direction: Direction) -> None:
    client, provider = opened(HONEST)
    check_run(stock(client, tmp_path))
    expected = provider.seen
    client, provider = opened(Fault(direction, math.nan, 3))
    with pytest.warns(NotFiniteWarning) as warned:
        model = stock(client, tmp_path)
    assert provider.seen == expected
    assert len([each for each in warned if each.category is NotFiniteWarning]) == 1
    with pytest.raises(NotFinite) as failed:
        check_run(model)
    assert str(failed.value) == FAILED
    assert run_states(client.load_model()).current.sends_zeros is False, "another model starts afresh"


def test_arithmetic_of_the_faults(served_model: ServedModel) -> None:
    """Checks that replies really hold the values on which these tests rely."""
    rows = torch.arange(64, dtype=torch.int32).view(2, 32)
    call = Call(1, FORWARD, Arithmetic.RING)
    honest = Overflower(served_model, HONEST).compute(call, rows)
    wrong = Overflower(served_model, Fault(FORWARD, 2.0**31)).compute(call, rows)
    assert torch.equal(wrong ^ honest, torch.full_like(honest, -(2**31)))
