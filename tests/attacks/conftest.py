"""What tests of attacks share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from attacks.report import command_line


@pytest.fixture
def no_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the positive controls out of a run, which would be most of it.

    They run in `test_extraction.py`, each by itself, and beside a whole run in `test_quick.py::test_the_quick_profile`.
    """

    @contextlib.contextmanager
    def none(names: str | None) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(recv=list)

    monkeypatch.setattr(command_line, "_controls_beside", none)
