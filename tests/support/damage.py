"""Damages a file as a failing disk would."""

from __future__ import annotations

from pathlib import Path


def flip(path: Path, offset: int | None = None) -> None:
    """Changes one bit of a file, in the byte at `offset` or, without `offset`, in the middle byte."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if offset is None else offset] ^= 1
    path.write_bytes(content)
