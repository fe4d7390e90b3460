"""Compiles the stand-in for the CUDA driver (tests/support/cuda_driver.c) against cuda.h, which comes with Triton, and
reads what the stand-in counts."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import triton

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
