"""Runs a function in a forked child process, and returns what the function returned."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

HANGS_S = 20
"""A child that has not ended after this many seconds counts as hanging."""


def in_child(work: Callable[[], str]) -> str:
    """Returns the result of `work` in a forked child. If `work` raised an exception, returns its type and text; if the
    child hangs, returns `hung`."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, lambda *_: (os.write(write, b"hung"), os._exit(1)))
        signal.alarm(HANGS_S)
        try:
            answer = work()
        except BaseException as exc:  # noqa: BLE001 - the child must end here, whatever happened
            answer = f"{type(exc).__name__}: {exc}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(pid, 0)
    return answer
