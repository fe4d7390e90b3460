"""Runs functions in several threads that begin at the same time or switch more often, and in a forked child
process."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
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


def in_thread(work: Callable[[], object]) -> threading.Thread:
    """Runs a function in a thread of its own, which has begun when this returns."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def switching_every(seconds: float) -> Iterator[None]:
    """Makes the interpreter switch threads after this many seconds inside the context. Python's default is five
    milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


HANGS_S = 20
"""A child that has not ended after this many seconds counts as hanging."""


def in_child(work: Callable[[], str]) -> str:
    """Returns the result of `work` in a forked child. If `work` raised an exception, returns its type and text; if the
    child hangs, returns `hung`; if a signal ended it, returns the signal's name.

    A child of this process has everything imported. To import torch takes a new process two seconds or more.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, lambda *_: (os.write(write, b"hung"), os._exit(1)))
        signal.alarm(HANGS_S)
        faulthandler.disable()  # a test whose child is to be ended by a signal expects that, without a traceback
        try:
            answer = work()
        except BaseException as exc:  # noqa: BLE001 - the child must end here, whatever happened
            answer = f"{type(exc).__name__}: {exc}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read().decode()
    ended_by = -os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return signal.Signals(ended_by).name if ended_by > 0 else answer
