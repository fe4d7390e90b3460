"""Damages a file in the way that a bad disk does."""

from __future__ import annotations

from pathlib import Path


def flip(path: Path, offset: int | None = None) -> None:
    """Changes one bit of a file: of the byte at `offset`, or else of the one in its middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if offset is None else offset] ^= 1
    path.write_bytes(content)
