"""Tests what lets losses decide (early stopping, keeping the best adapter): it decides as the stock Trainer does, and
is refused where a provider that lies could steer it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, EarlyStoppingCallback

from provider.model.served_model import ServedModel
from tenant_sdk import TenantClient
from tenant_sdk.training.settings import Evaluation
from tenant_sdk.training.trainers import steps_without_progress
from tests.support.lattice import TOY_OPTIONS
from tests.support.providers import serving
from tests.support.spies import before_requests
from tests.support.training import QUICK, ROWS, TOLERANCE, logged, lora, stock_trainer, tokenized
from wire.errors import ConfigurationError

OTHERS = [
    {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    for question, answer in (("who?", "nobody"), ("where?", "9 % ^"), ("when?", "{never}"), ("what?", "~~~"))
]
"""Rows on which a tiny model first gets better and then, as it learns ROWS by heart, worse."""
OVERFIT: dict[str, Any] = {**QUICK, "max_steps": 14, "learning_rate": 0.1, "eval_steps": 2, "save_steps": 2}


def stock(folder: Path, scratch: Path, **options: Any) -> Any:
    """Returns a stock Trainer that has trained with OVERFIT and has kept its best adapter."""
    return stock_trainer(
        AutoModelForCausalLM.from_pretrained(folder), lora(), scratch, tokenized(), eval_rows=tokenized(OTHERS),
        **{**OVERFIT, "eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True, **options},
    )  # fmt: skip


@pytest.mark.parametrize("threshold", [0.0, 0.02])
@pytest.mark.parametrize("patience", [1, 2])
def test_a_run_stops_where_the_stock_trainer_stops(
    chat_client: TenantClient, chat_folder: Path, tmp_path: Path, patience: int, threshold: float
) -> None:
    callback = EarlyStoppingCallback(patience, threshold)
    want = stock(chat_folder, tmp_path / "stock", callbacks=[callback])
    got = chat_client.finetune(
        ROWS, lora(), tmp_path / "out", eval_data=OTHERS, early_stopping_steps=2 * patience,
        early_stopping_threshold=threshold, keep_best=True, **OVERFIT,
    )  # fmt: skip
    assert 0 < want.state.global_step < 14, "the stock run did not stop early"
    assert len(got.losses) == want.state.global_step
    assert [each.loss for each in got.evaluations] == pytest.approx(logged(want, "eval_loss"), rel=TOLERANCE)
    assert got.adapter_step == want.state.best_global_step
    assert threshold or got.adapter_step < len(got.losses)


def test_the_best_adapter_is_written(chat_client: TenantClient, chat_folder: Path, tmp_path: Path) -> None:
    want = stock(chat_folder, tmp_path / "stock")
    got = chat_client.finetune(ROWS, lora(), tmp_path / "best", eval_data=OTHERS, keep_best=True, **OVERFIT)
    assert len(got.losses) == 14
    assert got.adapter_step == want.state.best_global_step < 14
    assert got.adapter_step == min(got.evaluations, key=lambda each: each.loss).step
    want.model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("best", "theirs"))
    for name, tensor in theirs.items():
        assert float((ours[name] - tensor).norm() / tensor.norm().clamp_min(1e-9)) < 1e-3, name
    last = chat_client.finetune(ROWS, lora(), tmp_path / "last", eval_data=OTHERS, **OVERFIT)
    assert last.adapter_step == 14
    assert last.losses == got.losses
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(chat_folder), tmp_path / "best")
    assert loaded.active_adapter == "default"


def test_a_resumed_run_stops_and_keeps_as_a_whole_one(
    chat_client: TenantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**OVERFIT, "early_stopping_steps": 4, "keep_best": True}
    want = chat_client.finetune(ROWS, lora(), tmp_path / "whole", eval_data=OTHERS, **options)
    per_step, calls = 0, 0

    def count(call: Any, payload: Any) -> None:
        nonlocal calls
        calls += 1
        if per_step and calls > per_step:
            raise KeyboardInterrupt

    before_requests(monkeypatch, count)
    chat_client.finetune(ROWS, lora(), tmp_path / "counted", eval_data=OTHERS, **options)
    per_step, calls = calls - calls // (2 * len(want.losses)), 0  # it fails in the last step before the end
    with pytest.raises(KeyboardInterrupt):
        chat_client.finetune(ROWS, lora(), tmp_path / "out", eval_data=OTHERS, **options)
    per_step = 0
    got = chat_client.finetune(ROWS, lora(), tmp_path / "out", eval_data=OTHERS, **options)
    assert got.resumed_from_step > 0
    assert (len(got.losses), got.adapter_step) == (len(want.losses), want.adapter_step)


def history(*losses: float) -> list[Evaluation]:
    return [Evaluation(10 * number, loss) for number, loss in enumerate(losses, 1)]


@pytest.mark.parametrize(
    ("losses", "threshold", "steps"),
    [
        ((), 0, 0), ((3,), 0, 0), ((3, 2, 1), 0, 0), ((3, 2, 2), 0, 10), ((3, 1, 2, 2), 0, 20), ((1, 2, 3, 0.5), 0, 0),
        ((3, 2.95, 2.91), 0.1, 20), ((3, 2.95, 2.8), 0.1, 0), ((3, math.nan, math.nan), 0, 20),
    ],
)  # fmt: skip
def test_steps_without_progress(losses: tuple[float, ...], threshold: float, steps: int) -> None:
    assert steps_without_progress(history(*losses), threshold) == steps


BRANCHES: list[dict[str, Any]] = [{"early_stopping_steps": 2}, {"keep_best": True}]


@pytest.mark.parametrize("branch", BRANCHES, ids=str)
@pytest.mark.parametrize("mask", ["lattice", "off", "gaussian-pool"])
def test_a_provider_that_is_not_verified_may_not_steer_a_run(
    branch: dict[str, Any], mask: str, chat_served_model: ServedModel, tmp_path: Path
) -> None:
    """Where a mask hides rows, what depends on losses is refused before a row is sent; masks that hide nothing leave
    nothing to protect."""
    with (
        serving(chat_served_model) as server,
        TenantClient(
            f"grpc://127.0.0.1:{server.port}", mask=mask, cache=tmp_path / "cache", progress=False,
            mask_options={**TOY_OPTIONS, "hints": "stream", "background": False} if mask == "lattice" else None,
        ) as client,
    ):  # fmt: skip
        options = {**QUICK, "max_steps": 2, "eval_data": OTHERS, **branch}
        if mask == "lattice":
            before = client.traffic.calls, client.traffic.bytes_up
            with pytest.raises(ConfigurationError, match=r"provider that lies .* \(verify=, --verify\)") as failure:
                client.finetune(ROWS, lora(r=2), tmp_path / "out", **options)
            assert "\n" not in str(failure.value)
            assert (client.traffic.calls, client.traffic.bytes_up) == before
            assert not (tmp_path / ".out.checkpoints").exists()
        else:
            assert client.finetune(ROWS, lora(r=2), tmp_path / "out", **options).evaluations


def test_explain_says_what_a_run_shows(chat_served_model: ServedModel, chat_folder: Path, tmp_path: Path) -> None:
    options = {"cache": tmp_path / "cache", "progress": False}
    with serving(chat_served_model) as server:
        url = f"grpc://127.0.0.1:{server.port}"
        said = []
        for given in ({}, {"verify": chat_folder}, {"mask": "off"}):
            with TenantClient(url, **options, **given) as client:
                lines = client.explain(everything=True).splitlines()
                said.append(next((line for line in lines if line.startswith("fine-tuning")), ""))
    unverified, verified, off = said
    for line in (unverified, verified):
        assert "an evaluation shows as forward passes of the same rows" in line
        assert "a preference as two sequences, each sent forward twice" in line
        assert "truncation='drop' by how many rows are left" in line
    assert "early_stopping_steps and keep_best are refused" in unverified
    assert "early_stopping_steps by when the evaluation's loss stopped falling" in verified
    assert off == ""


def test_who_can_be_steered(chat_folder: Path, tmp_path: Path) -> None:
    url = "grpc://127.0.0.1:1"
    for given, expected in (
        ({"url": url}, True), ({"url": url, "mask": "pad"}, True), ({"url": url, "mask": "off"}, False),
        ({"url": url, "mask": "gaussian-pool"}, False), ({"url": url, "verify": chat_folder}, False),
        ({"url": f"inproc:{chat_folder}"}, False),
        ({"url": [url, "grpc://127.0.0.1:2"], "mask": "shares"}, True),
        ({"url": [url, f"inproc:{chat_folder}"], "mask": "shares"}, True),
    ):  # fmt: skip
        with TenantClientUnconnected(**given, cache=tmp_path) as client:
            assert client.can_be_steered is expected, given


class TenantClientUnconnected(TenantClient):
    """Implements a client that does not connect when it is entered."""

    def __enter__(self) -> TenantClient:
        return self


@pytest.mark.parametrize("branch", BRANCHES, ids=str)
def test_without_an_evaluation_there_is_nothing_to_decide_by(
    branch: dict[str, Any], chat_client: TenantClient, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=r"needs an evaluation: name rows with eval_data"):
        chat_client.finetune(ROWS, lora(), tmp_path / "out", **QUICK, **branch)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep_best": True, "eval_steps": 4}, "expected eval_steps as save_steps, 2, got 4"),
        ({"early_stopping_steps": 0}, "early_stopping_steps must be positive, got 0"),
        ({"early_stopping_steps": 2, "early_stopping_threshold": -1.0}, "early_stopping_threshold must be a finite"),
    ],
    ids=str,
)
def test_options_that_cannot_be(options: dict[str, Any], text: str, chat_client: TenantClient, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=text):
        chat_client.finetune(ROWS, lora(), tmp_path / "out", eval_data=OTHERS, **QUICK, **options)
