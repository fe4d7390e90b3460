"""How many cores one operation uses, thread by thread."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

Item = TypeVar("Item")

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
    use_cores(1)


def use_cores(count: int) -> None:
    """The same for any number of cores, and as often as one likes: it takes a microsecond."""
    torch.get_num_threads()  # torch sets a new thread's count at first use: let that come first
    for set_number in _setters():
        set_number(count)


def spare_cores() -> None:
    """Until `return_cores`, this thread's operations use one core, but for those in `all_cores`."""
    count = torch.get_num_threads()
    if count > 1:
        _local.spared = count
        use_cores(1)


def return_cores() -> None:
    """Ends `spare_cores`; nothing where it was not called, or the thread had one core."""
    count, _local.spared = getattr(_local, "spared", 0), 0
    if count:
        use_cores(count)


@contextlib.contextmanager
def all_cores() -> Iterator[None]:
    """For work that is worth sharing, in the middle of what is not."""
    count, before = getattr(_local, "spared", 0), torch.get_num_threads()
    if not count:
        yield
        return
    use_cores(count)
    try:
        yield
    finally:
        use_cores(before)  # all of them, inside another such block


@functools.cache
def _setters() -> tuple[Callable[[int], object], ...]:
    folder = Path(torch.__file__).parent / "lib"
    found: list[Callable[[int], object]] = []
    for library in folder.glob("libgomp*.so*"):
        found.append(ctypes.CDLL(str(library)).omp_set_num_threads)
    for library in folder.glob("libtorch_cpu.so"):  # torch has told MKL its own count, which OpenMP's does not change
        found.append(getattr(ctypes.CDLL(str(library)), "MKL_Set_Num_Threads_Local", int))
    return tuple(found)


def share(work: Callable[[Iterator[Item]], None], items: Sequence[Item]) -> None:
    """Runs `work` in the calling thread and in helpers, on one iterator: each item goes to one of them.

    `work` must hold what it writes to: where the calling thread is interrupted, a helper may end its item later.

    As many threads as torch uses in the calling one. A helper that is busy elsewhere is not waited for, and none spins
    when it is done: OpenMP's do, on a core that a tenant on the same machine, or the thread that encrypts, could use.

    Raises:
        Whatever `work` raised, after all have ended.
    """
    queue = iter(items)  # of a sequence: next() is atomic
    num_helpers = min(torch.get_num_threads(), len(items)) - 1
    if num_helpers < 1:
        work(queue)
        return
    helpers: list[Future[None]] = []
    try:
        with contextlib.suppress(RuntimeError):  # no thread is left in the machine, or the process ends: less help
            for _ in range(num_helpers):
                helpers.append(_executor().submit(work, queue))
        work(queue)
    finally:
        deque(queue, maxlen=0)  # after an error, who begins late finds nothing to do
        failures = [helper.exception() for helper in helpers if not helper.cancel()]
    for failure in failures:
        if failure is not None:
            raise failure


_lock = threading.Lock()
_made: ThreadPoolExecutor | None = None


def _executor() -> ThreadPoolExecutor:
    global _made
    with _lock:
        if _made is None:
            _made = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="veilbase-products")
        return _made


def _after_fork_in_child() -> None:
    global _lock, _made
    _lock, _made = threading.Lock(), None  # threads do not survive a fork


os.register_at_fork(after_in_child=_after_fork_in_child)
