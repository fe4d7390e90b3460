"""Holds a fixture that several tests of the attacks use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from attacks.report import command_line


@pytest.fixture
def no_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the positive controls out of a run, since they would take most of the run's time.

    Instead `test_closed_form.py` runs each control by itself, and `test_quick.py::test_the_quick_profile` runs two
    beside a whole run.
    """

    @contextlib.contextmanager
    def none(names: str | None) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(recv=list)

    monkeypatch.setattr(command_line, "_controls_beside", none)
