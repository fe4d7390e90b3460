"""Lets a test run on the CPU, and also on a GPU where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def cpu_and(device: str) -> list[Any]:
    """Returns the parameters "cpu" and `device`, a CUDA device; the latter is marked `gpu`, and skipped without a
    GPU."""
    return ["cpu", pytest.param(device, marks=[pytest.mark.gpu, needs_cuda])]
