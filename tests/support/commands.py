"""Runs `provider` and `tenant serve` as operating system processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from tests.support import waiting


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the command until it ends, and returns the finished process."""
    command = [sys.executable, "-m", "provider", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=waiting.limit_s)


def one_line_error(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the error line of a command that failed, after checking that the command printed just this line."""
    lines = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("provider: ")
    return lines[0]


class Serving:
    """Runs `provider serve` in a process until `stop` is called. At the end of a `with` block, the process is killed if
    it still runs."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "provider", "serve", "--threads", "1", *map(str, arguments)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        word, self.url = self.process.stdout.readline().split()
        assert word == "ready"

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str, str]:
        """Sends a signal to the process. Returns the exit status and the text of standard output and standard error."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=waiting.limit_s)
        return self.process.returncode, out, err

    def __enter__(self) -> Serving:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.stop(signal.SIGKILL)


class ServeCommand:
    """Holds a `tenant serve` that serves a local model, with its own provider, on a free port."""

    def __init__(self, model: Path, adapters: Path, env: dict[str, str] | None = None) -> None:
        """Starts the command, and waits until it is ready."""
        command = [
            sys.executable, "-m", "tenant_sdk", "serve", "--url", f"inproc:{model}", "--verify", str(model),
            "--adapters", str(adapters), "--port", "0",
        ]  # fmt: skip
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - a pipe that nobody reads would stop the server
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, text=True, env={**os.environ, **(env or {})}
        )
        self.printed: list[str] = []
        """The lines that the command printed, up to the one that says that it is ready."""
        assert self.process.stdout is not None
        while not self.printed or not self.printed[-1].startswith("ready "):
            self.printed.append(self.process.stdout.readline().strip())
            assert self.process.poll() is None, self._read_log()
        self.key, self.url = self.printed[-2].removeprefix("key "), self.printed[-1].removeprefix("ready ")

    def end(self, number: signal.Signals) -> str:
        """Sends a signal, waits for the end of the process, and returns what it wrote to stderr."""
        self.process.send_signal(number)
        self.process.communicate(timeout=waiting.limit_s)
        return self._read_log()

    def _read_log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def __enter__(self) -> ServeCommand:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGKILL)
        self._log.close()
