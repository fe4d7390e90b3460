"""How many cores one operation uses, thread by thread."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import torch

_local = threading.local()


def use_one_core() -> None:
    """From now on this thread's own torch operations run on one core; other threads keep theirs.

    One row times a matrix is too small to share: waking OpenMP's other threads costs more than it saves, and takes a
    core from whoever encrypts. `torch.set_num_threads` would change every thread (and MKL), so this asks OpenMP, whose
    setting belongs to the calling thread. Without torch's own libgomp it does nothing.
    """
    if getattr(_local, "done", False):
        return
    _local.done = True
    torch.get_num_threads()  # torch sets a new thread's count at first use: let that come first
    for library in Path(torch.__file__).parent.glob("lib/libgomp*.so*"):
        ctypes.CDLL(str(library)).omp_set_num_threads(1)
