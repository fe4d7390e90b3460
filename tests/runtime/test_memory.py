"""Tests what is told of free memory: the machine's, a smaller limit of a control group, or that it is unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime import memory
from runtime.memory import free_memory

FREE = 3000 << 10
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
VERSION_2 = ("memory.max", "memory.current", "inactive_file")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder in place of /: a machine with 3,000 KiB that are free, and a process in the group /a/b."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:    3000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("12:cpu,cpuacct:/c\n4:memory:/a/b\n0::/a/b\nno line\n")
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    return tmp_path


def limited(folder: Path, names: tuple[str, str, str], limit: str, used: str, cache: int | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    if cache is not None:
        (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\nfile 7\n")


def test_this_machine_has_some() -> None:
    free = free_memory()
    assert free is None or 1e6 < free < 1e15


@pytest.mark.parametrize("group", ["", "a", "a/b"])
@pytest.mark.parametrize(
    ("limit", "used", "cache", "free"),
    [
        ("max", "5", None, FREE),
        ("1000000", "400000", None, 600_000),
        ("1000000", "400000", 100_000, 700_000),
        ("9000000000", "5", None, FREE),
        ("10", "20", None, 0),
        ("no number", "1", None, FREE),
        (str((1 << 63) - 4096), "5", None, FREE),
    ],
)
@pytest.mark.parametrize(("folder", "names"), [("sys/fs/cgroup", VERSION_2), ("sys/fs/cgroup/memory", VERSION_1)])
def test_the_limit_of_each_control_group_counts(
    root: Path,
    folder: str,
    names: tuple[str, str, str],
    group: str,
    limit: str,
    used: str,
    cache: int | None,
    free: int,
) -> None:
    limited(root / folder / group, names, limit, used, cache)
    assert free_memory() == free


def test_the_least_that_a_group_leaves_counts(root: Path) -> None:
    limited(root / "sys/fs/cgroup/a/b", VERSION_2, "2000000", "100000")
    limited(root / "sys/fs/cgroup/a", VERSION_2, "1500000", "1000000")
    limited(root / "sys/fs/cgroup/c", VERSION_2, "10", "9")  # not of this process
    assert free_memory() == 500_000


def test_without_control_groups_the_machines_counts(root: Path) -> None:
    (root / "proc/self/cgroup").unlink()
    assert free_memory() == FREE
    limited(root / "sys/fs/cgroup", VERSION_2, "1000000", "400000")  # a container's own group is its root
    assert free_memory() == 600_000


@pytest.mark.parametrize("text", [None, "", "MemAvailable\n", "MemFree: 5 kB\n", "MemAvailable: many kB\n"])
def test_what_the_system_does_not_tell_is_unknown(root: Path, text: str | None) -> None:
    if text is None:
        (root / "proc/meminfo").unlink()
    else:
        (root / "proc/meminfo").write_text(text)
    assert free_memory() is None
