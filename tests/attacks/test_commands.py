"""Tests that the commands of attacks/ parse their arguments before they load torch, which takes seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from attacks import extract_lora, recover_prompts
from attacks.report.catalogue import adversaries
from attacks.report.command_line import OTHER_PROGRAMS, summaries

CODE = """
import importlib, sys
try:
    importlib.import_module({module!r}).main({words!r})
except SystemExit as ended:
    print("ended", ended.code)
assert not {{"torch", "transformers", "grpc"}} & set(sys.modules)
"""


@pytest.mark.parametrize("module", ["attacks.extract_lora", "attacks.recover_prompts", *OTHER_PROGRAMS])
def test_help_and_a_word_that_is_no_option_do_not_wait_for_torch(module: str) -> None:
    for words, status in ((["--help"], 0), (["--no-such-option"], 2)):
        code = CODE.format(module=module, words=words)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == f"ended {status}"
        assert f"python -m {module}" in done.stdout + done.stderr


@pytest.mark.parametrize("module", [extract_lora, recover_prompts])
def test_the_list_names_the_adversaries_without_torch(module: ModuleType) -> None:
    code = CODE.format(module=module.__name__, words=["--list"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "programs of their own:" in done.stdout
    default = getattr(module, "ADVERSARIES", None)
    expected = [(one.name, one.summary) for one in adversaries(default)]
    assert list(summaries(default).items()) == expected
    assert done.stdout.splitlines()[: len(expected)] == [f"{name:22} {summary}" for name, summary in expected]


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_is_said_once(tmp_path: Path) -> None:
    """A terminal sends it to all processes: to the controls, the provider and the victim, too."""
    with subprocess.Popen(
        [sys.executable, "-m", "attacks.extract_lora", "--out", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("records the traffic"):
                break
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=100)
    assert (process.returncode, out, err) == (130, "", "attacks.extract_lora: stopped\n")
