"""Locates the repository, and reads the golden vectors of tests/vectors/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
"""The repository's root folder, which holds the packages, tests/ and docs/."""


def golden_vectors(name: str) -> list[dict[str, Any]]:
    """Returns the test cases in a file of tests/vectors/."""
    content = json.loads((ROOT / "tests" / "vectors" / name).read_text())
    cases: list[dict[str, Any]] = content["cases"]
    return cases
