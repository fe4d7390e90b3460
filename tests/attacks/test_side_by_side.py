"""Cases attacked in several processes: in order, and each process ends at a word."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from attacks import cli, evaluate


@pytest.fixture
def exit_at_sigterm() -> Iterator[None]:
    """As the command line has it."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, leave)
    yield
    signal.signal(signal.SIGTERM, before)


def test_processes_side_by_side_end_at_once(
    exit_at_sigterm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that turned the signal into an exception, and lost it between two bytecodes, was waited for without end."""

    def seen(case: Any, *others: object) -> list[Any]:
        return [(case, signal.getsignal(signal.SIGTERM))]

    monkeypatch.setattr(evaluate, "attack", seen)
    found: list[Any] = list(cli._attack_all(["a", "b"], [], tmp_path, 2))  # type: ignore[list-item]
    parts = len(evaluate.parts([]))
    assert found == [(case, signal.SIG_DFL) for case in "ab" for _ in range(parts)]
