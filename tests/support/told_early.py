"""Runs many command lines in one fresh process in which torch, transformers and gRPC cannot be imported, and tells of
each what it printed, how it ended, and whether it wanted one of these: `python -m tests.support.told_early PROGRAM`,
with a list of command lines as JSON on standard input."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.repository import ROOT

HEAVY = ("torch", "transformers", "grpc")
PROGRAMS = {"tenant": "tenant_sdk.cli", "provider": "provider.cli", "attacks": "attacks.extract_lora"}
"""The module with the `main` of each program."""


@dataclass(frozen=True)
class Told:
    """Holds how a command line ended.

    Attributes:
        code: the exit code; None if the command went on until it wanted to import a heavy library.
        said: what it printed on standard error.
        wanted: the library.
    """

    code: int | None
    said: str
    wanted: str = ""


class _Wanted(BaseException):
    """Says that a heavy library was about to be imported; nothing catches it."""


class _Refusing:
    """Finds the heavy libraries, as `importlib.util.find_spec` asks, and refuses to load them."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.partition(".")[0] in HEAVY else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        raise _Wanted(spec.name)

    def exec_module(self, module: object) -> None:
        raise AssertionError("a module that was refused is not run")


def outcomes(program: str, lines: Sequence[Sequence[str]], folder: Path) -> list[Told]:
    """Returns how each command line of a program ends, in their order; each begins in `folder`."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("VEILBASE_", "PYTEST"))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.told_early", program], cwd=folder, text=True, timeout=110,
        input=json.dumps(lines), capture_output=True,
        env={**env, "PYTHONPATH": str(ROOT), "HOME": str(folder), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [Told(*each) for each in json.loads(done.stdout)]


def _outcome(program: str, words: Sequence[str]) -> tuple[int | None, str, str]:
    main: Any = importlib.import_module(PROGRAMS[program]).main
    said = io.StringIO()
    with (
        contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()),
        mock.patch.object(sys, "argv", [program, *words]), mock.patch.object(sys, "stdin", io.StringIO()),
    ):  # fmt: skip
        try:
            return main() or 0, said.getvalue(), ""
        except SystemExit as ended:
            return int(ended.code or 0), said.getvalue(), ""
        except _Wanted as exc:
            return None, said.getvalue(), str(exc)
        except Exception:  # noqa: BLE001 - it would be a traceback, which the tests refuse
            return 1, traceback.format_exc(), ""


def _run() -> None:
    assert not set(HEAVY) & set(sys.modules)
    sys.meta_path.insert(0, _Refusing())  # type: ignore[arg-type]
    print(json.dumps([_outcome(sys.argv[1], words) for words in json.load(sys.stdin)]))


if __name__ == "__main__":
    _run()
