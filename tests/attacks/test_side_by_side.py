"""Tests that cases are attacked in several processes, in order, and that each process ends on a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

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
command_line.attack_all(["quick", "slow"], [], Path("."), 2)
"""


SIDE_BY_SIDE = """
import signal, sys
from pathlib import Path
from attacks.report import command_line
from attacks.report import evaluate
blocked = []
set_work = command_line._set_work
def set_work_and_look(*work):
    blocked.append(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []))
    set_work(*work)
    blocked.append(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []))
def seen(case, *others):
    return [(case, blocked, signal.getsignal(signal.SIGTERM).name)]
evaluate.attack, command_line._set_work = seen, set_work_and_look
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
for result in command_line.attack_all(["a", "b"], [], Path("."), 2):
    print(*result)
print(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


def test_processes_side_by_side_end_at_once() -> None:
    """If a process turned the signal into an exception and lost this exception, the parent would wait for it without
    end. As in a real run, the processes are forked from one that has no other threads."""
    command = [sys.executable, "-c", SIDE_BY_SIDE]
    folder = Path(command_line.__file__).parents[2]
    lines = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WAIT_S).stdout.splitlines()
    parts = len(evaluate.parts([]))
    assert lines == [f"{case} [True, False] SIG_DFL" for case in "ab" for _ in range(parts)] + ["False"]


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
