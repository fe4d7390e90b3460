"""Tests that cases are attacked in several processes, in order, and that each process ends on a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from attacks.report import command_line, evaluate
from tests.support.waiting import WAIT_S

STUCK = """
import os, signal, sys, threading, time
from pathlib import Path
from attacks.report import command_line
from attacks.report import evaluate
def seen(case, *others):
    if case == "slow":
        time.sleep(1)  # until the other one waits for more
        os.write(1, b"busy")
        time.sleep(60)
    return [case]
evaluate.attack, evaluate.parts = seen, lambda chosen: [[]]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
command_line._attack_all(["quick", "slow"], [], Path("."), 2)
"""


@pytest.fixture
def exit_at_sigterm() -> Iterator[None]:
    """Sets the signal handler that the command line sets."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, leave)
    yield
    signal.signal(signal.SIGTERM, before)


def test_processes_side_by_side_end_at_once(
    exit_at_sigterm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a process turned the signal into an exception and lost this exception, the parent would wait for it without
    end."""

    def seen(case: Any, *others: object) -> list[Any]:
        return [(case, signal.getsignal(signal.SIGTERM))]

    monkeypatch.setattr(evaluate, "attack", seen)
    found: list[Any] = list(command_line._attack_all(["a", "b"], [], tmp_path, 2))  # type: ignore[list-item]
    parts = len(evaluate.parts([]))
    assert found == [(case, signal.SIG_DFL) for case in "ab" for _ in range(parts)]


@pytest.mark.slow
def test_a_signal_to_the_whole_group_ends_them_all(tmp_path: Path) -> None:
    """The signal goes to the whole process group, as `timeout` sends it. An idle process could end while it holds the
    lock of the work queue."""
    child = subprocess.Popen(
        [sys.executable, "-c", STUCK], cwd=Path(command_line.__file__).parents[2], stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert child.stdout.read(4) == b"busy"
        os.killpg(child.pid, signal.SIGTERM)
        assert child.wait(timeout=WAIT_S) == 143
        assert child.stdout.read() == b""  # all processes that held the pipe have ended
    finally:
        child.kill()
        child.wait()
