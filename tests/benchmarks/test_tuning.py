"""Tests that importing benchmarks/common.py does not load torch, so that a worker can call `tune` first. Otherwise
decoding was a fifth slower."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("name", ["common", "decode", "finetune_step", "tenants"])
def test_a_worker_can_tune_before_torch_is_loaded(name: str) -> None:
    code = f"import sys, benchmarks.{name}; print(sorted({{'torch', 'grpc'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("[]", "['grpc']"), "torch reads its settings when it is loaded"
