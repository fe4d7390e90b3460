"""Runs the `provider` command as an operating system process."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.support.waiting import WAIT_S


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
    command = [sys.executable, "-m", "provider", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)


def one_line_error(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the one line that a command which failed has written."""
    lines = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("provider: ")
    return lines[0]


class Serving:
    """Runs `provider serve` until it is stopped."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "provider", "serve", "--threads", "1", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        word, self.url = self.process.stdout.readline().split()
        assert word == "ready"

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str, str]:
        """Sends a signal, and returns the exit status and what was written to either stream."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, out, err
