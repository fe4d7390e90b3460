"""Tests how Ctrl-C and SIGTERM end the commands: with one line, whatever they are doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.repository import ROOT

GOES_ON = "; the same command goes on from the last checkpoint, if there is one"
INTERRUPTED = """
import os, signal, sys
try:
    os.kill(os.getpid(), signal.{number})
    for _ in range(1000):  # a handler runs between two steps of the interpreter
        pass
except BaseException:  # as packages do that can go on without a part of theirs
    pass
raise ImportError("cannot load module more than once per process")
"""
"""A package whose import is interrupted, as torch's may be, and fails for another reason then."""


def stopped(words: Sequence[str], folder: Path, number: signal.Signals = signal.SIGINT) -> tuple[int, list[str]]:
    """Runs a command, which a signal reaches while it imports torch, transformers or gRPC. Returns its exit status, and
    what it printed on stderr."""
    for name in ("torch", "transformers", "grpc"):
        (folder / f"{name}.py").write_text(INTERRUPTED.format(number=number.name))
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text('{"model_type": "llama"}')
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    env = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == ""
    return done.returncode, done.stderr.splitlines()


SEND = ("--url", "inproc:model")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tenant_sdk", "generate", "who?", *SEND), "tenant: stopped"),
        (("tenant_sdk", "chat", *SEND), "tenant: stopped"),
        (("tenant_sdk", "explain", *SEND), "tenant: stopped"),
        (("tenant_sdk", "serve", "--unverified", "--port", "0", *SEND), "tenant: stopped"),
        (("tenant_sdk", "plan", "rows.jsonl", *SEND), "tenant: stopped"),
        (("tenant_sdk", "finetune", "rows.jsonl", "--output", "new", *SEND), f"tenant: stopped{GOES_ON}"),
        (("provider", "serve", "--model", "model", "--port", "0", "--state", "state"), "provider: stopped"),
        (("attacks.extract_lora",), "attacks.extract_lora: stopped"),
        (("attacks.recover_prompts",), "attacks.recover_prompts: stopped"),
        *(((f"attacks.{name}",), f"attacks.{name}: stopped")
          for name in ("active", "game", "growth", "overflow", "weakenings")),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_ctrl_c_while_torch_is_imported(words: Sequence[str], said: str, tmp_path: Path) -> None:
    status, lines = stopped(words, tmp_path)
    assert [line for line in lines if "loading torch" not in line] == [said]
    assert status == 130


@pytest.mark.parametrize(("program", "status"), [("tenant_sdk", 143), ("provider", 0)])
def test_sigterm_while_torch_is_imported(program: str, status: int, tmp_path: Path) -> None:
    """A supervisor that stops a provider has what it wants."""
    words = {
        "tenant_sdk": ("tenant_sdk", "explain", *SEND),
        "provider": ("provider", "serve", "--model", "model", "--port", "0", "--state", "state"),
    }
    name = program.partition("_")[0]
    assert stopped(words[program], tmp_path, signal.SIGTERM) == (status, [f"{name}: stopped"])


def of(code: str) -> tuple[int, str]:
    """Runs code that has imported this project's module, and returns its exit status and what it said."""
    given = f"import os, signal, time\nfrom runtime.stopping import *\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", given], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return done.returncode, done.stderr


INTERRUPT, TERMINATE = (
    f"    os.kill(os.getpid(), signal.{name})\n    time.sleep(9)\n" for name in ("SIGINT", "SIGTERM")
)


@pytest.mark.parametrize(("ended", "status"), [(INTERRUPT, 130), (TERMINATE, 143), ("    raise SystemExit(130)", 130)])
def test_what_is_open_is_closed_before_the_line(ended: str, status: int) -> None:
    closing = ended.replace("    ", "        ")
    code = f"with told_when_stopped('it'):\n    try:\n{closing}\n    finally:\n        os.write(2, b'closed ')\n"
    assert of(code) == (status, "closed it: stopped\n")


def test_other_ends_say_nothing() -> None:
    assert of("with told_when_stopped('it'):\n    raise SystemExit(3)") == (3, "")
    assert of("with told_when_stopped('it'):\n    pass") == (0, "")


def test_what_is_said_can_be_more() -> None:
    code = f"with told_when_stopped('it'):\n    say_when_stopped('stopped; begin again')\n{INTERRUPT}"
    assert of(code) == (130, "it: stopped; begin again\n")
    again = f"try:\n    {code.replace(chr(10), chr(10) + '    ')}\nexcept SystemExit:\n    pass\n"
    said = of(f"{again}with told_when_stopped('it'):\n{INTERRUPT}")[1]
    assert said == "it: stopped; begin again\nit: stopped\n"


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_ignored_signal_stays_ignored(name: str) -> None:
    kill = f"os.kill(os.getpid(), signal.{name})"
    code = f"signal.signal(signal.{name}, signal.SIG_IGN)\nwith told_when_stopped('it'), at_once('it'):\n    {kill}\n"
    assert of(code) == (0, "")


def test_the_line_is_said_once() -> None:
    code = f"with told_when_stopped('it'):\n    tell_stopped('it')\n    tell_stopped('it')\n{INTERRUPT}"
    assert of(code) == (130, "it: stopped\n")
