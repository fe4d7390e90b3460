"""Lets a test run on the CPU and also on a GPU where there is one, and stands in for the CUDA driver and for faults of
`torch._int_mm` where there is none."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from wire.ring import product_triton

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def cpu_and(device: str) -> list[Any]:
    """Returns the parameters "cpu" and `device`, a CUDA device; the latter is marked `gpu`, and skipped without a
    GPU."""
    return ["cpu", pytest.param(device, marks=[pytest.mark.gpu, needs_cuda])]


def multiplied_on_cuda(rows: torch.Tensor, weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the product of rows and a weight on the first CUDA device, brought back to the CPU."""
    # Moving a tensor keeps its strides.
    return product_triton.product(rows.cuda(), weight.cuda(), bits).cpu()


def saturating(limbs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiplies as processors without VNNI do, where sums of neighbouring products saturate at 16 bits."""
    pairs = limbs.to(torch.int64)[:, :, None] * weight.to(torch.int64)[None]
    return (pairs[:, ::2] + pairs[:, 1::2]).clamp(-(2**15), 2**15 - 1).sum(1).to(torch.int32)


def missing(limbs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Raises the error of a device for which `torch._int_mm` is not implemented."""
    raise RuntimeError("_int_mm is not implemented")


def gone(limbs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Raises the error of a torch that has no `_int_mm`."""
    raise AttributeError("module 'torch' has no attribute '_int_mm'")


SOURCE = Path(__file__).with_name("cuda_driver.c")
UNIT = 1 << 21
"""The stand-in's allocations are multiples of so many bytes."""


@functools.cache
def stand_in() -> StandIn:
    """Returns the compiled stand-in of this process."""
    return StandIn()


class StandIn:
    """Holds the compiled stand-in, and what tests set and count there."""

    def __init__(self) -> None:
        import triton

        self._folder = tempfile.TemporaryDirectory(prefix="veilbase-cuda-")
        self.library = f"{self._folder.name}/libcuda.so.1"
        include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
        command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{include}", "-o", self.library]
        subprocess.run([*command, str(SOURCE)], check=True, timeout=60)
        self._loaded = ctypes.CDLL(self.library)
        for name in ("stand_in_mapped", "stand_in_handles", "stand_in_layout"):
            getattr(self._loaded, name).restype = ctypes.c_size_t
        self._loaded.stand_in_limit.argtypes = [ctypes.c_size_t]

    @property
    def mapped_bytes(self) -> int:
        """Returns the bytes that are mapped in this process."""
        return int(self._loaded.stand_in_mapped())

    @property
    def num_handles(self) -> int:
        """Returns the number of allocations whose handle was not given back."""
        return int(self._loaded.stand_in_handles())

    def layout(self, which: int) -> int:
        """Returns a size, an offset or a constant of cuda.h; the order is that of `stand_in_layout`."""
        return int(self._loaded.stand_in_layout(which))

    def limit(self, num_bytes: int = 1 << 30) -> None:
        """Makes larger allocations fail for lack of memory."""
        self._loaded.stand_in_limit(num_bytes)

    def misses(self, attribute: int = 0) -> None:
        """Makes all devices lack what an attribute stands for; 0 gives them everything."""
        self._loaded.stand_in_misses(attribute)
