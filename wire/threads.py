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
    setting belongs to the calling thread, and MKL for the same. Where torch has neither in its folder it does nothing.
    """
    if getattr(_local, "done", False):
        return
    _local.done = True
    torch.get_num_threads()  # torch sets a new thread's count at first use: let that come first
    folder = Path(torch.__file__).parent / "lib"
    for library in folder.glob("libgomp*.so*"):
        ctypes.CDLL(str(library)).omp_set_num_threads(1)
    for library in folder.glob("libtorch_cpu.so"):  # torch has told MKL its own count, which OpenMP's does not change
        getattr(ctypes.CDLL(str(library)), "MKL_Set_Num_Threads_Local", int)(1)
