"""This module tells how much memory a process may still take.

Guarantees: nothing is measured at import, and nothing is imported from the other packages.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
"""The folder below which the system's files are."""
_FILES = {
    # controllers of a line of /proc/self/cgroup: folder, limit, use, and what of the use the kernel drops first
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""The files of control groups of version 2 and of version 1."""
_UNLIMITED = 1 << 60
"""A limit of a control group of version 1 from which on it stands for none."""


def free_memory() -> int | None:
    """Returns the bytes of memory that the machine and this process's control groups leave free; None where Linux's
    files do not tell. Pages of files that a control group has not used lately count as free, since the kernel drops
    them first."""
    try:
        fields = dict(line.split(":", 1) for line in (ROOT / "proc/meminfo").read_text(encoding="ascii").splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None
    return max(0, min([free, *_left_by_groups()]))


def _left_by_groups() -> Iterator[int]:
    """Yields what each control group of this process that has a limit leaves free."""
    try:
        lines = (ROOT / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    groups = {controllers: "/" for controllers in _FILES}  # A container sees its own group as the root.
    groups |= {each[1]: each[2] for line in lines if len(each := line.split(":", 2)) == 3 and each[1] in _FILES}
    for controllers, path in groups.items():
        folder, *files = _FILES[controllers]
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            left = _left(ROOT.joinpath("sys/fs/cgroup", folder, *parts[:depth]), *files)
            if left is not None:
                yield left


def _left(group: Path, limit: str, used: str, cache: str) -> int | None:
    try:
        most = int((group / limit).read_text(encoding="ascii"))
        taken = int((group / used).read_text(encoding="ascii"))
    except (OSError, ValueError):  # There is no such file, or it says "max".
        return None
    if most >= _UNLIMITED:
        return None
    try:
        stat = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        taken -= int(stat[cache])
    except (OSError, ValueError, KeyError):
        pass
    return most - taken
