"""One core for one thread: its own operations, whichever library makes them, and nobody else's."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from wire.threads import use_one_core

TORCH_CPU = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
HAS_GOMP = bool(list(TORCH_CPU.parent.glob("libgomp*.so*")))


def mkl_threads() -> int:
    """How many MKL would use in this thread; 0 where torch has none."""
    return int(getattr(ctypes.CDLL(str(TORCH_CPU)), "MKL_Get_Max_Threads", int)()) if TORCH_CPU.exists() else 0


def counts() -> tuple[int, int]:
    return torch.get_num_threads(), mkl_threads()


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(not HAS_GOMP, reason="this torch has no libgomp of its own")
@pytest.mark.usefixtures("_two_threads")
def test_only_the_thread_that_asks_is_alone() -> None:
    seen: list[tuple[int, int]] = []

    def run() -> None:
        use_one_core()
        seen.append(counts())

    before = counts()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(1, min(1, before[1]))]
    assert counts() == before
    assert before[0] == 2
