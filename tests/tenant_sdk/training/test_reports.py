"""Tests reports for TensorBoard: its files hold the losses, and nothing is sent anywhere."""

from __future__ import annotations

import socket
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tenant_sdk import TenantClient
from tests.support.spies import before_requests
from tests.support.training import QUICK, ROWS, lora
from wire.errors import ConfigurationError, Unavailable


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns the (step, value) pairs in TensorBoard's files, by name."""
    found = EventAccumulator(str(folder)).Reload()
    return {name: [(each.step, each.value) for each in found.Scalars(name)] for name in found.Tags()["scalars"]}


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns a list to which each attempt to open a connection is added."""
    tried: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: tried.append(address))
    return tried


def test_losses_and_metrics(chat_client: TenantClient, tmp_path: Path, no_network: list[Any]) -> None:
    options = {**QUICK, "report_to": "tensorboard", "eval_steps": 2}
    result = chat_client.finetune(ROWS, lora(), tmp_path / "out", eval_data=ROWS[:2], **options)
    found = scalars(tmp_path / ".out.logs")
    assert [step for step, _ in found["train/loss"]] == list(range(1, 7))
    assert [value for _, value in found["train/loss"]] == pytest.approx(result.losses, rel=1e-6)
    assert [step for step, _ in found["eval/loss"]] == [2, 4, 6]
    assert [value for _, value in found["eval/loss"]] == pytest.approx(
        [each.loss for each in result.evaluations], rel=1e-6
    )
    assert {"eval/accuracy", "train/learning_rate", "train/grad_norm"} <= set(found)
    assert stat.S_IMODE((tmp_path / ".out.logs").stat().st_mode) == 0o700
    assert no_network == []


def test_a_folder_of_ones_own_and_none_by_default(chat_client: TenantClient, tmp_path: Path) -> None:
    options = {**QUICK, "max_steps": 1}
    chat_client.finetune(ROWS, lora(), tmp_path / "out", report_to="tensorboard", log_dir=tmp_path / "logs", **options)
    assert "train/loss" in scalars(tmp_path / "logs")
    chat_client.finetune(ROWS, lora(), tmp_path / "quiet", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "out", "quiet"]


def test_a_run_that_fails_leaves_its_losses(
    chat_client: TenantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def fail(call: Any, payload: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 60:
            raise Unavailable("gone")

    before_requests(monkeypatch, fail)
    with pytest.raises(Unavailable):
        chat_client.finetune(ROWS, lora(), tmp_path / "out", report_to="tensorboard", **QUICK)
    assert scalars(tmp_path / ".out.logs")["train/loss"]


@pytest.mark.parametrize("report_to", ["wandb", "all", ["tensorboard"], ""])
def test_others_are_refused(chat_client: TenantClient, tmp_path: Path, report_to: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^report_to must be 'tensorboard' or None, .* over a network$"):
        chat_client.finetune(ROWS, lora(), tmp_path / "out", report_to=report_to, **QUICK)
    assert list(tmp_path.iterdir()) == []


def test_without_tensorboard(chat_client: TenantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'veilbase\[tensorboard\]'$"):
        chat_client.finetune(ROWS, lora(), tmp_path / "out", report_to="tensorboard", **QUICK)
