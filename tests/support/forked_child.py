"""Runs a function in a forked child and returns what it said."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

HANGS_S = 20
"""Seconds until a child counts as hanging."""


def in_child(work: Callable[[], str]) -> str:
    """Returns what `work` says in a forked child, an exception with its type and text, or `hung`."""
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
