"""Records the results of a function without changing the function."""

from __future__ import annotations

from typing import Any

import pytest


def results_of(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Returns a list to which every further result of the function `owner.name` is added."""
    results: list[Any] = []
    function = getattr(owner, name)

    def spy(*arguments: Any, **options: Any) -> Any:
        results.append(function(*arguments, **options))
        return results[-1]

    monkeypatch.setattr(owner, name, spy)
    return results
