"""This module sets how many cores an operation uses, separately for each thread, and shares the work of one operation
among threads (`share`). `Workers` are the threads for this, and for masks (noise/blocks/pool.py)."""

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
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

_local = threading.local()


def use_one_core() -> None:
    """Makes torch operations of the calling thread run on one core from now on; other threads keep their number of
    cores.

    A product of one row and a matrix is too small to share: waking OpenMP's other threads costs more than it saves, and
    takes a core from the thread that encrypts messages. `torch.set_num_threads` would change every thread, and MKL as a
    whole. This function sets OpenMP's number, which belongs to the calling thread, and MKL's number for this thread. It
    does nothing if torch's folder holds neither library, or if this thread has called it before.
    """
    if getattr(_local, "done", False):
        return
    _local.done = True
    _use_cores(1)


def _use_cores(count: int) -> None:
    """Makes torch operations of the calling thread run on `count` cores; see `use_one_core`. It takes a microsecond, so
    it may be called often."""
    torch.get_num_threads()  # torch sets a new thread's count at its first use, which must come first.
    for set_number in _setters():
        set_number(count)


def spare_cores() -> None:
    """Makes operations of the calling thread use one core until `return_cores`, except for operations inside
    `all_cores`."""
    count = torch.get_num_threads()
    if count > 1:
        _local.spared = count
        _use_cores(1)


def return_cores() -> None:
    """Ends `spare_cores`; does nothing if `spare_cores` was not called or the thread had one core."""
    count, _local.spared = getattr(_local, "spared", 0), 0
    if count:
        _use_cores(count)


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Makes operations of the calling thread use one core inside the context, and as many as before after it."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    try:
        _use_cores(1)
        yield
    finally:
        _use_cores(before)


@contextlib.contextmanager
def all_cores() -> Iterator[None]:
    """Lets the calling thread use all of its cores again, for work that is worth sharing between `spare_cores` and
    `return_cores`."""
    count, before = getattr(_local, "spared", 0), torch.get_num_threads()
    if not count:
        yield
        return
    _use_cores(count)
    try:
        yield
    finally:
        _use_cores(before)  # Inside another such block, `before` is already the number of all cores.


@functools.cache
def _setters() -> tuple[Callable[[int], object], ...]:
    folder = Path(torch.__file__).parent / "lib"
    found: list[Callable[[int], object]] = []
    for library in folder.glob("libgomp*.so*"):
        found.append(ctypes.CDLL(str(library)).omp_set_num_threads)
    # torch has given MKL a count of its own, which OpenMP's setting does not change.
    for library in folder.glob("libtorch_cpu.so"):
        found.append(getattr(ctypes.CDLL(str(library)), "MKL_Set_Num_Threads_Local", int))
    return tuple(found)


class Workers:
    """Runs one kind of work in threads in which a torch operation uses one core. There are as many as the machine has
    cores. They are started at first use, and anew in a forked child, since threads do not survive a fork.

    Kinds of work that wait for each other's threads have `Workers` of their own.
    """

    def __init__(self, name: str) -> None:
        """Starts no thread yet; the threads' names will begin with `name`."""
        self._name = name
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[..., Result], *given: Any) -> Future[Result]:
        """Runs `work` with these arguments in one of the threads, once one is free. Raises RuntimeError if the machine
        has no thread left, or the process is ending."""
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(os.cpu_count() or 1, self._name, use_one_core)
            executor = self._executor
        return executor.submit(work, *given)


_helpers = Workers("veilbase-products")


def share(work: Callable[[Iterator[Item]], None], items: Sequence[Item], workers: Workers = _helpers) -> None:
    """Runs `work` in the calling thread and in helper threads, all with one iterator, so that each item goes to one
    thread.

    `work` must keep references to the memory that it writes to: if the calling thread is interrupted, a helper thread
    may finish its item later.

    The number of threads is the number that torch uses in the calling thread. The call does not wait for helper threads
    that are busy with other work. No helper thread spins after its last item, as OpenMP's threads would; a tenant on
    the same machine, or the thread that encrypts, can use that core.

    Args:
        work: takes items until there are none.
        items: the items.
        workers: the threads that help.

    Raises:
        Whatever `work` raised, after all helper threads that had begun are done with it.
    """
    queue = iter(items)  # This is the iterator of a sequence, whose next() is atomic.
    num_helpers = min(torch.get_num_threads(), len(items)) - 1
    if num_helpers < 1:
        work(queue)
        return
    gate = _Gate()
    try:
        # If the machine has no thread left, or the process is ending, there are fewer helpers.
        with contextlib.suppress(RuntimeError):
            for _ in range(num_helpers):
                workers.submit(gate.run, work, queue)
        work(queue)
    finally:
        deque(queue, maxlen=0)  # After an error, helpers find nothing more to do.
        gate.close()
    if gate.failures:
        raise gate.failures[0]


class _Gate:
    """Counts the helpers of one call that have begun and not ended, and keeps out those that begin too late. Futures
    cannot tell: `submit` that raises, since no thread could be started, has put the work in the executor's queue all
    the same, and a thread that was busy may take it at any time."""

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._num_running, self._is_closed = 0, False
        self.failures: list[BaseException] = []

    def run(self, work: Callable[[Iterator[Item]], None], queue: Iterator[Item]) -> None:
        """Runs `work`, or nothing if the gate is closed."""
        with self._state:
            if self._is_closed:
                return
            self._num_running += 1
        try:
            work(queue)
        except BaseException as exc:  # noqa: BLE001 - raised by the calling thread
            self.failures.append(exc)
        finally:
            with self._state:
                self._num_running -= 1
                self._state.notify_all()

    def close(self) -> None:
        """Keeps later helpers out, and waits for those that have begun."""
        with self._state:
            self._is_closed = True
            self._state.wait_for(lambda: self._num_running == 0)
