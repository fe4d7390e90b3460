"""Tests that the commands of attacks/ parse their arguments before they load torch, which takes seconds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from attacks.report.command_line import OTHER_PROGRAMS

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
