"""This module tells how much memory a process may still take.

Guarantees: nothing is measured at import, and nothing is imported from the other packages.
"""

from __future__ import annotations

from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Returns the bytes of memory that the machine and this process's control group leave free; None where Linux's
    files do not tell."""
    try:
        fields = dict(line.split(":", 1) for line in _MEMORY.read_text(encoding="ascii").splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None
    try:
        limit = (_GROUP / "memory.max").read_text(encoding="ascii").strip()
        used = (_GROUP / "memory.current").read_text(encoding="ascii").strip()
        return max(0, min(free, int(limit) - int(used))) if limit != "max" else free
    except (OSError, ValueError):
        return free
