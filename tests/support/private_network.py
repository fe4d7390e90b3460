"""Moves the calling thread, and what it starts from then on, into a network namespace with a loopback device only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator

_CLONE_NEWNET = 0x40000000


def why_not() -> str | None:
    """Returns why no namespace can be made here, or None if one can."""
    done = subprocess.run(["unshare", "--net", "ip", "link", "set", "lo", "up"], capture_output=True)
    return None if done.returncode == 0 else "network namespaces need root and iproute2"


@contextlib.contextmanager
def private_network() -> Iterator[None]:
    """Within this context, the calling thread's sockets, and those of threads and processes that it starts, reach only
    each other."""
    libc = ctypes.CDLL(None, use_errno=True)
    outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        yield
    finally:
        libc.setns(outside, _CLONE_NEWNET)
        os.close(outside)
