"""Runs functions in several threads that begin at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.support.waiting import WAIT_S


def at_once(calls: Sequence[Callable[[], Any]], wait_s: float = WAIT_S) -> list[Any]:
    """Runs each call in a thread of its own, all beginning at once, and returns their results. Each may take `wait_s`
    seconds."""
    gate = threading.Barrier(len(calls))

    def begin(call: Callable[[], Any]) -> Any:
        gate.wait(wait_s)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result(wait_s) for each in [pool.submit(begin, call) for call in calls]]


def together(num_threads: int, work: Callable[[], Any]) -> list[Any]:
    """Runs `work` in the given number of threads, all beginning at once, and returns the results."""
    return at_once([work] * num_threads)
