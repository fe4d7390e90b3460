"""Runs one function in many threads that are let go at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.support.waiting import WAIT_S


def together(num_threads: int, work: Callable[[], Any]) -> list[Any]:
    """Runs `work` in that many threads, all let go at once."""
    gate = threading.Barrier(num_threads)

    def run(_: int) -> Any:
        gate.wait(WAIT_S)
        return work()

    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(run, range(num_threads)))
