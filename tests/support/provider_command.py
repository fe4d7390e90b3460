"""Runs the `provider` command as an operating system process."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.support.waiting import WAIT_S


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the command until it ends, and returns the finished process."""
    command = [sys.executable, "-m", "provider", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)


def one_line_error(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the error line of a command that failed, after checking that the command printed just this line."""
    lines = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("provider: ")
    return lines[0]


class Serving:
    """Runs `provider serve` in a process until `stop` is called."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "provider", "serve", "--threads", "1", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        word, self.url = self.process.stdout.readline().split()
        assert word == "ready"

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str, str]:
        """Sends a signal to the process. Returns the exit status and the text of standard output and standard error."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, out, err
