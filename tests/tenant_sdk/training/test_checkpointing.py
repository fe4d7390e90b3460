"""Tests the option that chooses how training saves memory: contradictory options, the choice of `auto`, and a full
disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tenant_sdk.training import activation_checkpointing
from tenant_sdk.training.activation_checkpointing import choose, estimate, has_dropout
from tenant_sdk.training.settings import resolve
from tests.support.spies import before_requests
from tests.support.training import QUICK, ROWS, lora
from wire.errors import ConfigurationError, StorageError


@pytest.mark.parametrize(
    ("checkpointing", "older", "budget", "mode"),
    [
        ("auto", False, None, "auto"), ("auto", True, None, "recompute"), ("recompute", True, None, "recompute"),
        ("replies", False, 0, "replies"), ("replies", False, 12.5, "replies"), (None, False, None, None),
        ("auto", False, 100, "auto"),
    ],
)  # fmt: skip
def test_options_that_go_together(checkpointing: Any, older: bool, budget: Any, mode: str | None) -> None:
    assert resolve(checkpointing, older, budget) == mode


@pytest.mark.parametrize(
    "options",
    [
        {"checkpointing": "replys"}, {"checkpointing": "none"}, {"checkpointing": True},
        {"checkpointing": "replies", "gradient_checkpointing": True},
        {"checkpointing": None, "gradient_checkpointing": True},
        {"checkpointing": None, "memory_budget_mb": 100}, {"checkpointing": "recompute", "memory_budget_mb": 100},
        {"gradient_checkpointing": True, "memory_budget_mb": 100}, {"memory_budget_mb": -1},
        {"memory_budget_mb": float("nan")}, {"memory_budget_mb": float("inf")}, {"memory_budget_mb": True},
        {"memory_budget_mb": "2GB"},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_contradict(chat_client: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"checkpointing|memory_budget_mb") as failure:
        chat_client.finetune(ROWS, lora(), tmp_path / "out", **QUICK, **options)
    assert "\n" not in str(failure.value)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def base(chat_client: Any) -> Any:
    return chat_client.load_model()


MEGABYTES = 1e6
NUM_ROWS = 100_000


def chosen(base: Any, budget_mb: float | None, folder: Path, mode: str = "auto", taken: int = 0) -> str | None:
    made = choose(mode, base, NUM_ROWS, False, budget_mb, folder, taken)
    made.close()
    return made.mode


def test_auto_is_the_cheapest_that_fits(base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need = estimate(base, NUM_ROWS, False)
    assert 0 < need.replies < need.plain
    assert chosen(base, need.plain / MEGABYTES + 1, tmp_path) is None
    assert chosen(base, need.plain / MEGABYTES - 1, tmp_path) == "replies"
    assert chosen(base, 0, tmp_path) == "replies"
    disk = SimpleNamespace(free=need.stored + 10)
    monkeypatch.setattr(activation_checkpointing.shutil, "disk_usage", lambda folder: disk)
    assert chosen(base, 0, tmp_path, taken=10) == "replies"
    assert chosen(base, 0, tmp_path, taken=need.stored // 2) == "recompute", "something else takes the room"
    disk.free = need.stored // 2
    assert chosen(base, 0, tmp_path) == "recompute", "the disk has no room"
    assert chosen(base, (need.working + 0.6 * need.stored) / MEGABYTES, tmp_path) == "replies", "memory has it"
    with pytest.raises(StorageError, match="MB of free disk for replies") as failure:
        chosen(base, 0, tmp_path, "replies")
    assert "\n" not in str(failure.value)


def test_without_a_budget_half_of_the_free_memory_counts(
    base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = estimate(base, NUM_ROWS, False).plain
    for free, mode in ((2 * plain + 10, None), (2 * plain - 10, "replies")):
        monkeypatch.setattr(activation_checkpointing, "free_memory", lambda free=free: free)
        assert chosen(base, None, tmp_path) == mode


def test_without_a_budget_replies_go_to_a_disk_that_has_room(
    base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who names this mode wants memory; half of the free memory would often hold all replies."""
    need = estimate(base, NUM_ROWS, False)
    budgets = []
    monkeypatch.setattr(activation_checkpointing, "ReplyStore", lambda in_memory, folder: budgets.append(in_memory))
    monkeypatch.setattr(activation_checkpointing, "free_memory", lambda: 4 * need.stored)
    room = int(need.stored * 1.2) + (256 << 20)
    for free_disk, is_tmpfs in ((room + 1, False), (room - 1, False), (room + 1, True)):
        monkeypatch.setattr(activation_checkpointing, "is_in_memory", lambda folder, is_tmpfs=is_tmpfs: is_tmpfs)
        disk = SimpleNamespace(free=free_disk)
        monkeypatch.setattr(activation_checkpointing.shutil, "disk_usage", lambda folder, disk=disk: disk)
        choose("replies", base, NUM_ROWS, False, None, tmp_path)
    assert budgets == [0, 2 * need.stored - need.working, 2 * need.stored - need.working]
    assert [line.split(f"{tmp_path} ")[1] for line in caplog.messages] == ["has little room", "is memory, too (tmpfs)"]


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="needs a tmpfs at /dev/shm")
def test_a_tmpfs_is_memory(tmp_path: Path) -> None:
    assert activation_checkpointing.is_in_memory(Path("/dev/shm/not/there/yet"))
    assert not activation_checkpointing.is_in_memory(Path("/proc"))


def test_estimates_grow_with_rows_and_dropout(base: Any) -> None:
    one, two, dropout = estimate(base, 100, False), estimate(base, 200, False), estimate(base, 100, True)
    assert (two.plain, two.replies) == (2 * one.plain, 2 * one.replies)
    assert dropout.plain > one.plain
    # 2 blocks of q 32, k 16, v 16, o 32, gate 64, up 64, down 32 outputs in float32
    assert one.replies == 100 * 2 * 256 * 4
    assert not has_dropout(base)
    assert has_dropout(torch.nn.Sequential(torch.nn.Dropout(0.1)))


def test_a_model_without_checkpointing(base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(base), "supports_gradient_checkpointing", False)
    assert chosen(base, 0, tmp_path) is None
    made = choose("recompute", base, NUM_ROWS, False, None, tmp_path)
    with pytest.raises(ConfigurationError, match="does not support gradient_checkpointing"):
        made.turn_on(base)


@pytest.fixture
def trims(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the list of the calls of `malloc_trim`, which is replaced by a function that takes no time."""
    calls: list[int] = []
    monkeypatch.setattr(activation_checkpointing, "_next_trim", 0.0)
    monkeypatch.setattr(activation_checkpointing, "TRIM_SHARE", 1e6)  # every call is made, however fast they follow
    monkeypatch.setattr(activation_checkpointing, "glibc_malloc_trim", lambda: calls.append)
    return calls


def test_pages_go_back_as_often_as_it_is_worth_its_time(trims: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((1.0, 1.0, 1.5, 2.0, 10.9, 11.6, 11.6, 11.7))
    monkeypatch.setattr(activation_checkpointing, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(activation_checkpointing, "TRIM_SHARE", 0.05)
    for expected in (1, 1, 1, 2):  # the first call took half a second, so the next may come ten seconds later
        activation_checkpointing.give_pages_back()
        assert len(trims) == expected


def test_another_libc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_checkpointing, "glibc_malloc_trim", lambda: None)
    activation_checkpointing.give_pages_back()


@pytest.mark.parametrize(("mode", "times"), [("replies", 2), ("recompute", 2), (None, 0)])
def test_each_run_of_a_block_gives_pages_back(
    trims: list[int], chat_client: Any, tmp_path: Path, mode: str | None, times: int
) -> None:
    chat_client.finetune(ROWS, lora(), tmp_path / "out", **{**QUICK, "checkpointing": mode})
    num_blocks = chat_client.load_model().config.num_hidden_layers
    assert len(trims) == QUICK["max_steps"] * num_blocks * times


REPLIES: dict[str, Any] = {**QUICK, "checkpointing": "replies", "memory_budget_mb": 0}


def test_a_full_disk_ends_the_run_before_the_step(
    chat_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no disk space for the replies of the third batch. The run ends before this step sends a single row."""
    plain: list[Any] = []
    before_requests(monkeypatch, lambda call, payload: plain.append(call))
    chat_client.finetune(ROWS, lora(), tmp_path / "plain", **REPLIES)
    per_step, sent = len(plain) // QUICK["max_steps"], plain.copy()
    plain.clear()
    steps = 0
    before_step = activation_checkpointing.Checkpointing.before_step

    def fill(self: Any, num_rows: int) -> None:
        nonlocal steps
        steps += 1
        before_step(self, num_rows if steps < 3 else 1 << 20)

    def allocate(fd: int, start: int, size: int) -> None:
        if size > 1 << 26:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(activation_checkpointing.Checkpointing, "before_step", fill)
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises(StorageError, match="No space left on device") as failure:
        chat_client.finetune(ROWS, lora(), tmp_path / "out", **REPLIES)
    assert "\n" not in str(failure.value)
    assert len(plain) == 2 * per_step
    assert len(sent) == 6 * per_step
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    resumed = chat_client.finetune(ROWS, lora(), tmp_path / "out", **{**REPLIES, "memory_budget_mb": None})
    assert resumed.resumed_from_step == 2, "another budget, or another mode, goes on with the same run"


def test_a_store_that_is_taken_away_in_a_step(
    chat_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    store = activation_checkpointing.ReplyStore

    def note(*arguments: Any) -> Any:
        made.append(store(*arguments))
        return made[-1]

    def take_away(call: Any, payload: Any) -> None:
        if call.direction.name == "BACKWARD":
            made[0].close()

    monkeypatch.setattr(activation_checkpointing, "ReplyStore", note)
    before_requests(monkeypatch, take_away)
    with pytest.raises(StorageError, match="cannot be used") as failure:
        chat_client.finetune(ROWS, lora(), tmp_path / "out", **REPLIES)
    assert "\n" not in str(failure.value)


def test_the_estimate_of_replies_is_what_a_step_keeps(
    chat_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Disk space is reserved before a step, and the step needs no more than this."""
    sizes: list[int] = []
    allocate = os.posix_fallocate

    def note(fd: int, start: int, size: int) -> None:
        sizes.append(size)
        allocate(fd, start, size)

    monkeypatch.setattr(os, "posix_fallocate", note)
    chat_client.finetune(ROWS, lora(), tmp_path / "out", **REPLIES)
    assert 1 <= len(sizes) <= 2, "one for each batch that is longer than those before"
