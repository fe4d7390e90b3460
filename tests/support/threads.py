"""Runs functions in threads that are let go at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.support.waiting import WAIT_S


def at_once(calls: Sequence[Callable[[], Any]], wait_s: float = WAIT_S) -> list[Any]:
    """Returns what each call gives, all begun together in threads; each may take `wait_s` seconds."""
    gate = threading.Barrier(len(calls))

    def begin(call: Callable[[], Any]) -> Any:
        gate.wait(wait_s)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result(wait_s) for each in [pool.submit(begin, call) for call in calls]]


def together(num_threads: int, work: Callable[[], Any]) -> list[Any]:
    """Returns what `work` gives in each of that many threads, all begun together."""
    return at_once([work] * num_threads)
