"""Tests evaluation during a run, and bf16: losses are those of the stock Trainer on the local model, and the calls
depend on shapes and settings alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PrefixTuningConfig, PromptTuningConfig
from transformers import AutoModelForCausalLM

from attacks.programs.overflow import Fault
from tenant_sdk import TenantClient
from tenant_sdk.model.run_state import NotFiniteWarning
from tenant_sdk.training.token_rows import Collator, parse_data
from tests.support.false_providers import HONEST, Opened
from tests.support.lattice import TOY_OPTIONS
from tests.support.parity import dequantised
from tests.support.spies import before_requests
from tests.support.training import QUICK, ROWS, TOLERANCE, logged, lora, stock_trainer, tokenized
from wire.errors import ConfigurationError, DatasetError, NotFinite
from wire.frame import Direction

OTHERS = [
    {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    for question, answer in (("who else?", "nobody"), ("since?", "ever"), ("whither?", "to Port Hale"), ("no?", "no."))
]
EVALUATED: dict[str, Any] = {**QUICK, "eval_steps": 2}


@pytest.fixture(scope="module")
def int8_client(chat_folder: Path) -> Iterator[TenantClient]:
    """Provides a client whose results equal those of the local dequantised model."""
    cache = chat_folder.with_name("int8-cache")
    with TenantClient(f"inproc:{chat_folder}", mask="off", arithmetic="float", cache=cache) as client:
        yield client


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_losses_are_those_of_the_stock_trainer(
    int8_client: TenantClient, chat_folder: Path, tmp_path: Path, bf16: bool
) -> None:
    """In bf16 each result is rounded to 8 bits, and the provider's products are rounded later than local ones."""
    stock = stock_trainer(
        dequantised(chat_folder), lora(), tmp_path / "stock", tokenized(), eval_rows=tokenized(OTHERS),
        eval_strategy="steps", eval_steps=2, bf16=bf16,
    )  # fmt: skip
    result = int8_client.finetune(ROWS, lora(), tmp_path / "out", eval_data=OTHERS, bf16=bf16, **EVALUATED)
    tolerance = 2e-3 if bf16 else TOLERANCE
    assert result.losses == pytest.approx(logged(stock), rel=tolerance)
    assert [each.step for each in result.evaluations] == [2, 4, 6]
    assert [each.loss for each in result.evaluations] == pytest.approx(logged(stock, "eval_loss"), rel=tolerance)
    assert len({each.loss for each in result.evaluations}) == 3
    assert result.adapter_step == 6
    if bf16:
        exact = int8_client.finetune(ROWS, lora(), tmp_path / "exact", **QUICK)
        assert result.losses != pytest.approx(exact.losses, rel=1e-6), "nothing was computed in bf16"


@pytest.mark.parametrize("config", [PromptTuningConfig, PrefixTuningConfig])
def test_losses_of_soft_prompts(config: Any, chat_client: TenantClient, chat_folder: Path, tmp_path: Path) -> None:
    made = config(num_virtual_tokens=4, task_type="CAUSAL_LM")
    stock = stock_trainer(
        AutoModelForCausalLM.from_pretrained(chat_folder), made, tmp_path / "stock", tokenized(),
        eval_rows=tokenized(OTHERS), eval_strategy="steps", eval_steps=2, max_steps=2,
    )  # fmt: skip
    options = {**EVALUATED, "max_steps": 2}
    (found,) = chat_client.finetune(ROWS, made, tmp_path / "out", eval_data=OTHERS, **options).evaluations
    assert [found.loss] == pytest.approx(logged(stock, "eval_loss"), rel=TOLERANCE)


def test_metrics_are_those_of_the_logits(chat_client: TenantClient, chat_folder: Path, tmp_path: Path) -> None:
    """The adapter changes nothing at this learning rate, so the metrics are those of the base model."""
    options = {**EVALUATED, "learning_rate": 1e-12, "max_steps": 2}
    (found,) = chat_client.finetune(ROWS, lora(), tmp_path / "out", eval_data=OTHERS, **options).evaluations
    batch = Collator(0)(tokenized(OTHERS))
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(chat_folder)(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    is_right = (logits.argmax(dim=-1) == labels)[labels != -100]
    assert found.metrics["accuracy"] == pytest.approx(float(is_right.float().mean()))
    assert found.metrics["perplexity"] == pytest.approx(math.exp(found.loss))
    assert set(found.metrics) == {"accuracy", "perplexity"}


@pytest.mark.parametrize(
    "options", [{"window_tokens": 24}, {"checkpointing": "replies", "memory_budget_mb": 0}], ids=str
)
def test_evaluation_beside_other_options(chat_client: TenantClient, tmp_path: Path, options: dict[str, Any]) -> None:
    plain = chat_client.finetune(ROWS, lora(), tmp_path / "plain", eval_data=OTHERS, **EVALUATED)
    other = chat_client.finetune(ROWS, lora(), tmp_path / "other", eval_data=OTHERS, **EVALUATED, **options)
    assert [each.loss for each in other.evaluations] == pytest.approx(
        [each.loss for each in plain.evaluations], rel=1e-5
    )


def test_an_evaluation_does_not_change_the_training(chat_client: TenantClient, tmp_path: Path) -> None:
    plain = chat_client.finetune(ROWS, lora(), tmp_path / "plain", **QUICK)
    assert plain.evaluations == []
    assert chat_client.finetune(ROWS, lora(), tmp_path / "out", eval_data=OTHERS, **EVALUATED).losses == plain.losses


def test_the_last_step_is_evaluated_and_checkpoints_hold_the_losses(
    chat_client: TenantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tenant_sdk.training import checkpoints

    states: list[Any] = []
    discard = checkpoints.Checkpoints.discard

    def keep(self: Any) -> None:
        states.extend(json.loads(path.read_text()) for path in sorted(self.folder.glob("*/trainer_state.json")))
        discard(self)

    monkeypatch.setattr(checkpoints.Checkpoints, "discard", keep)
    options = {**EVALUATED, "max_steps": 3}
    result = chat_client.finetune(ROWS, lora(), tmp_path / "out", eval_data=OTHERS, **options)
    assert [each.step for each in result.evaluations] == [2, 3]
    held = [[entry["eval_loss"] for entry in state["log_history"] if "eval_loss" in entry] for state in states]
    losses = [each.loss for each in result.evaluations]
    assert held == [losses[:1], losses]


def test_a_resumed_run_has_all_evaluations(
    chat_client: TenantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = chat_client.finetune(ROWS, lora(), tmp_path / "whole", eval_data=OTHERS, **EVALUATED)
    calls = 0

    def fail_late(call: Any, payload: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 100:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        before_requests(patch, fail_late)
        with pytest.raises(KeyboardInterrupt):
            chat_client.finetune(ROWS, lora(), tmp_path / "out", eval_data=OTHERS, **EVALUATED)
    result = chat_client.finetune(ROWS, lora(), tmp_path / "out", eval_data=OTHERS, **EVALUATED)
    assert result.resumed_from_step in (2, 4)
    assert [each.loss for each in result.evaluations] == pytest.approx(
        [each.loss for each in want.evaluations], rel=1e-5
    )
    with pytest.raises(ConfigurationError, match="no complete checkpoint"):
        chat_client.finetune(ROWS, lora(), tmp_path / "out", eval_data=OTHERS, resume=True, overwrite=True, **EVALUATED)


def test_a_part_is_held_back_by_the_seed_alone() -> None:
    rows = [{"text": f"row {number}"} for number in range(20)]
    others = [{"text": f"another text, of another length: {number}" * (number % 3 + 1)} for number in range(20)]
    for seed in (0, 1):
        found, of_others = parse_data(rows, 0.25, seed), parse_data(others, 0.25, seed)
        assert len(found.eval_rows) == 5
        assert [row.line for row in found.eval_rows] == [row.line for row in of_others.eval_rows]
        assert sorted(row.line for row in found.rows + found.eval_rows) == list(range(1, 21))
    held_back = [[row.line for row in parse_data(rows, 0.25, seed).eval_rows] for seed in (0, 1)]
    assert held_back[0] != held_back[1]
    assert len(parse_data(rows, 0.001, 0).eval_rows) == 1


def test_the_rows_held_back_are_not_trained_on(chat_client: TenantClient, tmp_path: Path) -> None:
    parsed = parse_data(ROWS, 0.25, 0)
    lines = [[row.line - 1 for row in rows] for rows in (parsed.rows, parsed.eval_rows)]
    want = chat_client.finetune(
        [ROWS[line] for line in lines[0]],
        lora(),
        tmp_path / "two",
        eval_data=[ROWS[line] for line in lines[1]],
        **EVALUATED,
    )
    got = chat_client.finetune(ROWS, lora(), tmp_path / "one", eval_data=0.25, **EVALUATED)
    assert got.losses == want.losses
    assert got.evaluations == want.evaluations


@pytest.mark.parametrize("part", [0.0, 1.0, -0.5, 3, float("nan"), True])
def test_a_part_that_cannot_be(part: float) -> None:
    with pytest.raises(ConfigurationError, match="between 0 and 1") as failure:
        parse_data(ROWS, part, 0)
    assert "\n" not in str(failure.value)


def test_data_that_cannot_be_evaluated(chat_client: TenantClient, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="leaves none to train on"):
        parse_data(ROWS[:1], 0.5, 0)
    with pytest.raises(DatasetError, match="at least one row"):
        chat_client.finetune(ROWS, lora(), tmp_path / "out", eval_data=[], **QUICK)
    with pytest.raises(ConfigurationError, match="eval_steps must be positive, got 0"):
        chat_client.finetune(ROWS, lora(), tmp_path / "out", eval_data=OTHERS, **{**QUICK, "eval_steps": 0})
    with pytest.raises(DatasetError, match=r"row 1: expected at most 16 tokens"):
        chat_client.finetune([{"text": "abc"}], lora(), tmp_path / "out", eval_data=OTHERS, max_length=16, **QUICK)
    assert list(tmp_path.iterdir()) == []


def of_one_length(letter: str) -> list[dict[str, str]]:
    return [{"prompt": letter * 5, "completion": letter.upper() * (7 - number % 2)} for number in range(6)]


@pytest.mark.parametrize("mask", ["off", "lattice"])
def test_the_calls_do_not_depend_on_what_rows_say(mask: str, opened: Opened, tmp_path: Path) -> None:
    """Two data sets of the same shape, one of which the model finds likelier, give the same calls."""
    seen = []
    for letter in "ax":
        client, provider = opened(HONEST, mask)
        options = {**EVALUATED, "max_steps": 3}
        client.finetune(of_one_length(letter), lora(r=2), tmp_path / letter, eval_data=0.5, **options)
        seen.append(provider.seen)
    assert seen[0] == seen[1]


def test_an_evaluation_is_forward_passes_of_the_same_rows(opened: Opened, tmp_path: Path) -> None:
    counts = []
    for steps in (
        {},
        {"eval_data": of_one_length("b"), "eval_steps": 1},
        {"eval_data": of_one_length("b"), "eval_steps": 2},
    ):
        client, provider = opened(HONEST)
        options = {**QUICK, "max_steps": 4}
        client.finetune(of_one_length("a"), lora(r=2), tmp_path / str(len(counts)), **{**options, **steps})
        counts.append([sum(each[2] == kind for each in provider.seen) for kind in ("FORWARD", "BACKWARD")])
    (plain, backward), (four, backward_of_four), (two, backward_of_two) = counts
    assert backward == backward_of_four == backward_of_two
    assert four - plain == 2 * (two - plain) > 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_changes_no_call(value: float, opened: Opened, tmp_path: Path) -> None:
    options = {**EVALUATED, "max_steps": 4, "eval_data": of_one_length("b")}
    client, provider = opened(HONEST)
    client.finetune(of_one_length("a"), lora(r=2), tmp_path / "honest", **options)
    expected = provider.seen
    client, provider = opened(Fault(Direction.FORWARD, value, len(expected) // 3))
    with pytest.warns(NotFiniteWarning), pytest.raises(NotFinite, match="nothing came of this run"):
        client.finetune(of_one_length("a"), lora(r=2), tmp_path / "out", **options)
    assert provider.seen == expected
    assert not (tmp_path / "out").exists()


def test_padded_rows_are_evaluated_in_as_many_rows_as_the_bucket(
    chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: set[int] = set()
    before_requests(monkeypatch, lambda call, payload: sizes.add(payload.num_rows))
    with TenantClient(f"inproc:{chat_folder}", mask="off", pad_rows=32, cache=tmp_path / "cache") as client:
        result = client.finetune(ROWS, lora(), tmp_path / "out", eval_data=OTHERS, **EVALUATED)
    assert sizes == {4 * 32}
    assert len(result.evaluations) == 3


def test_a_verified_run_under_lattice(chat_folder: Path, tmp_path: Path) -> None:
    options = {**TOY_OPTIONS, "hints": "stream", "background": False}
    with TenantClient(
        f"inproc:{chat_folder}", verify=chat_folder, mask_options=options, cache=tmp_path / "cache", progress=False
    ) as client:
        result = client.finetune(ROWS, lora(), tmp_path / "out", eval_data=OTHERS, keep_best=True, **QUICK)
    assert result.evaluations[-1].loss < result.evaluations[0].loss
