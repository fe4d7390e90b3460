"""Golden vectors: files made by make_vectors.py, and how tests read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def load(name: str) -> list[dict[str, Any]]:
    """The cases of one file beside this one."""
    content = json.loads((Path(__file__).parent / name).read_text())
    cases: list[dict[str, Any]] = content["cases"]
    return cases
