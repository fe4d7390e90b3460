"""Reads the golden vectors of tests/vectors/."""

from __future__ import annotations

import json
from typing import Any

from tests.support.repository import ROOT


def load(name: str) -> list[dict[str, Any]]:
    """Returns the test cases in a file of tests/vectors/."""
    content = json.loads((ROOT / "tests" / "vectors" / name).read_text())
    cases: list[dict[str, Any]] = content["cases"]
    return cases
