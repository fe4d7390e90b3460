"""Runs `tenant serve` as a process of its own, for tests that end or kill it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from tests.support.waiting import WAIT_S


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
        self.process.communicate(timeout=WAIT_S)
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
