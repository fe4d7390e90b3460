"""Tests fine-tuning and generation with DoRA: stored replies, recomputation and windows do not change the losses, and
an adapter that was trained in a verified session gives the same logits in stock PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from tenant_sdk import TenantClient
from tenant_sdk.model.dora import for_remote_base
from tenant_sdk.training.activation_checkpointing import estimate
from tenant_sdk.training.windows import Windows
from tests.support.lattice import TOY_OPTIONS
from tests.support.parity import RELATIVE, adapted, batch, dequantised, relative
from tests.support.spies import before_requests
from tests.support.tiny_models import gradients_of, padded_batch, whole_gradients
from tests.support.training import QUICK, ROWS, lora
from wire.errors import Unavailable
from wire.frame import Call, Direction
from wire.payload import Payload

SHORT = {**QUICK, "max_steps": 3}


def dora(**changes: Any) -> Any:
    return lora(r=3, use_dora=True, **changes)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Direction, int]]:
    """Provides a list of all requests: group, direction and number of rows."""
    seen: list[tuple[int, Direction, int]] = []

    def note(call: Call, payload: Payload) -> None:
        seen.append((call.group, call.direction, payload.num_rows))

    before_requests(monkeypatch, note)
    return seen


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_checkpointing_and_its_calls(chat_client: Any, tmp_path: Path, sent: Any, dropout: float) -> None:
    """Replies that are kept include those of dropout's second calls. A·W is not asked for again in a backward pass."""
    config = dora(lora_dropout=dropout)
    whole = chat_client.finetune(ROWS, config, tmp_path / "whole", checkpointing=None, **SHORT)
    plain = list(sent)
    for budget_mb in (0, 100):
        sent.clear()
        result = chat_client.finetune(
            ROWS, config, tmp_path / f"out{budget_mb}", checkpointing="replies", memory_budget_mb=budget_mb, **SHORT
        )
        assert result.losses == pytest.approx(whole.losses, rel=1e-5)
        assert sent == plain
    sent.clear()
    result = chat_client.finetune(ROWS, config, tmp_path / "recomputed", checkpointing="recompute", **SHORT)
    assert result.losses == pytest.approx(whole.losses, rel=1e-5)
    small = [(group, rows) for group, _, rows in plain if rows <= 9]
    assert [(group, rows) for group, _, rows in sent if rows <= 9] == small
    assert len(small) == 3 * 8, "one call for each group and step"
    assert whole.losses[-1] != pytest.approx(whole.losses[0], rel=1e-2)


def test_room_for_replies_counts_second_calls(chat_client: Any) -> None:
    plain = estimate(adapted(chat_client.load_model(), for_remote_base(dora())).get_base_model(), 10, False)
    model = adapted(chat_client.load_model(), for_remote_base(dora(lora_dropout=0.2))).get_base_model()
    second = 2 * (3 * 64 + 32 + 2 * 128 + 32)  # each of q, k, v gets the outputs of all three; so do gate and up
    assert estimate(model, 10, False).replies - plain.replies == 10 * 4 * second
    bare = estimate(chat_client.load_model(), 10, False)
    assert plain.plain > bare.plain
    assert plain.replies == bare.replies


@pytest.mark.parametrize("checkpointing", [None, "replies", "recompute"])
def test_windows(chat_client: Any, tmp_path: Path, checkpointing: str | None) -> None:
    whole = chat_client.finetune(ROWS, dora(), tmp_path / "whole", **SHORT)
    result = chat_client.finetune(
        ROWS, dora(), tmp_path / "out", window_tokens=24, checkpointing=checkpointing, **SHORT
    )
    assert result.losses == pytest.approx(whole.losses, rel=1e-4)


def test_gradients_in_windows(chat_client: Any) -> None:
    model = adapted(chat_client.load_model(), for_remote_base(dora())).train()
    _, want = whole_gradients(model, padded_batch())
    model.zero_grad()
    Windows(model, 8).backward(padded_batch())
    got = gradients_of(model)
    assert got.keys() == want.keys()
    assert any("magnitude" in name for name in want)
    assert all(relative(got[name], gradient) < 1e-5 for name, gradient in want.items())


@pytest.mark.parametrize("mask", ["off", "lattice"])
def test_a_verified_session_trains_reloads_and_answers(chat_folder: Path, tmp_path: Path, mask: str) -> None:
    """The adapter of a verified run gives the same logits here as in stock PEFT on the dequantised model, up to the
    mask's error. `generate` and `generate_many` give the same answer with it."""
    options: dict[str, Any] = (
        {} if mask == "off" else {"mask_options": {**TOY_OPTIONS, "hints": "stream", "background": False}}
    )
    with TenantClient(
        f"inproc:{chat_folder}", mask=mask, verify=str(chat_folder), cache=tmp_path / "cache", progress=False, **options
    ) as client:
        result = client.finetune(ROWS, dora(), tmp_path / "out", **QUICK)
        assert result.losses[-1] < result.losses[0]
        text = client.generate("who?", adapter=result.adapter_dir, max_new_tokens=6)
        (among_others, _) = client.generate_many(
            ["who?", "where?"], [result.adapter_dir, None], max_new_tokens=6, progress=False
        )
        with torch.no_grad():
            config = for_remote_base(dora())
            ours = PeftModel.from_pretrained(client.load_model(), result.adapter_dir, config=config).eval()
            logits = ours(batch()).logits
        stock = PeftModel.from_pretrained(dequantised(chat_folder), result.adapter_dir).eval()
        with torch.no_grad():
            assert relative(logits, stock(batch()).logits) < (RELATIVE if mask == "off" else 1e-2)
        assert text == among_others


def test_training_goes_on_where_it_stopped(chat_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = chat_client.finetune(ROWS, dora(), tmp_path / "whole", **QUICK)
    stop = {"at": 4}

    def fail(call: Call, payload: Payload) -> None:
        stop["rows"] = stop.get("rows", 0) + (payload.num_rows == 9)
        if stop["rows"] > 2 * stop["at"] and "done" not in stop:
            stop["done"] = 1
            raise Unavailable("the provider is away")

    before_requests(monkeypatch, fail)
    with pytest.raises(Unavailable):
        chat_client.finetune(ROWS, dora(), tmp_path / "out", **QUICK)
    result = chat_client.finetune(ROWS, dora(), tmp_path / "out", **QUICK)
    assert result.resumed_from_step == 4
    assert result.losses[-1] == pytest.approx(whole.losses[-1], rel=1e-4)
