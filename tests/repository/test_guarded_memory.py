"""Tests that the memory in which kernels are tested ends a process that reads past it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support.repository import ROOT

READS = """
import ctypes, sys, torch
from tests.support.compiled_kernels import guarded
tensor = guarded(torch.arange(5, dtype=torch.int32))
assert tensor.tolist() == [0, 1, 2, 3, 4]
ctypes.string_at(tensor.data_ptr(), int(sys.argv[1]))
print("read", flush=True)
"""


@pytest.mark.parametrize(("num_bytes", "code", "said"), [(20, 0, "read\n"), (21, -signal.SIGSEGV, "")])
def test_one_byte_past_the_end_ends_the_process(num_bytes: int, code: int, said: str) -> None:
    command = [sys.executable, "-c", READS, str(num_bytes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, said), done.stderr[-500:]
