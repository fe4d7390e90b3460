"""Tests what is told of free memory: the machine's, a smaller limit of the control group, or that it is unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime import memory
from runtime.memory import free_memory


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder in place of Linux's files: a machine with 3,000 KiB that are free, and no control group."""
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:    3000 kB\n")
    monkeypatch.setattr(memory, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_GROUP", tmp_path)
    return tmp_path


def test_this_machine_has_some() -> None:
    free = free_memory()
    assert free is None or 1e6 < free < 1e15


@pytest.mark.parametrize(
    ("limit", "used", "free"),
    [("max", "5", 3000 << 10), ("1000000", "400000", 600_000), ("9000000000", "5", 3000 << 10), ("10", "20", 0)],
)
def test_a_control_groups_limit_counts(files: Path, limit: str, used: str, free: int) -> None:
    (files / "memory.max").write_text(f"{limit}\n")
    (files / "memory.current").write_text(f"{used}\n")
    assert free_memory() == free


def test_without_a_control_group_the_machines_counts(files: Path) -> None:
    assert free_memory() == 3000 << 10
    (files / "memory.max").write_text("no number\n")
    (files / "memory.current").write_text("1\n")
    assert free_memory() == 3000 << 10


@pytest.mark.parametrize("text", [None, "", "MemAvailable\n", "MemFree: 5 kB\n", "MemAvailable: many kB\n"])
def test_what_the_system_does_not_tell_is_unknown(files: Path, text: str | None) -> None:
    if text is None:
        (files / "meminfo").unlink()
    else:
        (files / "meminfo").write_text(text)
    assert free_memory() is None
