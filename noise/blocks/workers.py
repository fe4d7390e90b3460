"""This module runs the threads that make masks. Each thread computes alone on one core, and the threads share a queue
of pieces of work.

The threads of torch are not suitable. An operation on a chunk of mask takes 100 µs, and after every operation OpenMP
makes its threads wait for each other, spinning. When other code computed on the same cores (the model, a provider on
the same machine), an operation took 20 to 100 times as long. Threads that never wait for each other lose only the time
that the other work takes.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def share(work: Callable[[Iterator[Item]], None], items: Sequence[Item]) -> None:
    """Runs `work` in several threads at once, all with one iterator, so that each item goes to one thread.

    The number of threads is the number that torch uses in the calling thread (`torch.set_num_threads`), but at most one
    for each item. If this is one, or no thread can be started, the calling thread itself runs `work`. Gradients are off
    in `work`.

    Raises:
        The error of one of the threads in which `work` failed, after all threads have ended.
    """
    num_workers = min(torch.get_num_threads(), len(items))
    queue = iter(items)  # This is the iterator of a sequence, whose next() is atomic.

    def run() -> None:
        with torch.inference_mode():
            work(queue)

    if num_workers <= 1:
        run()
        return
    pending: list[Future[None]] = []
    try:
        with contextlib.suppress(RuntimeError):  # The machine has no thread left, or the process ends.
            for _ in range(num_workers):
                pending.append(_executor().submit(run))
        if not pending:
            run()
        failures = [exc for exc in (future.exception() for future in pending) if exc is not None]
    finally:
        deque(queue, maxlen=0)  # After an error, a thread that begins late finds nothing to do.
    if failures:
        raise failures[0]


def alone(work: Callable[[], Result]) -> Result:
    """Runs `work` in one of this module's threads and returns its result, or raises its error. This is for an operation
    that torch, or MKL's FFT, would spread over several threads if the calling thread ran it.

    Threads that torch or MKL start for an operation spin afterwards, on the cores that the pieces of the next step
    need, which costs these pieces a third of their time.
    """
    return _executor().submit(torch.inference_mode()(work)).result()


_lock = threading.Lock()
_made: ThreadPoolExecutor | None = None


def _executor() -> ThreadPoolExecutor:
    global _made
    with _lock:
        if _made is None:
            _made = _single_threaded(os.cpu_count() or 1)
        return _made


def _single_threaded(num_workers: int) -> ThreadPoolExecutor:
    """Makes worker threads in which a torch operation uses one thread. Other threads keep their number.

    torch keeps the number for the calling thread and also for the process, for threads that have not computed yet.
    """
    before = torch.get_num_threads()
    all_started = threading.Barrier(num_workers)

    def start() -> None:
        torch.get_num_threads()  # torch reads the process's number here, and not at the first operation.
        torch.set_num_threads(1)
        all_started.wait()

    executor = ThreadPoolExecutor(num_workers, thread_name_prefix="veilbase-masks", initializer=start)
    try:
        for _ in range(num_workers):
            executor.submit(int)
        # The barrier is passed when every thread has its number; only then is the process's number restored.
        executor.submit(int).result()
    except RuntimeError:
        all_started.abort()  # Otherwise the threads that did start would wait for the others.
        raise
    finally:
        torch.set_num_threads(before)
    return executor


def _after_fork_in_child() -> None:
    global _lock, _made
    _lock, _made = threading.Lock(), None  # Threads do not survive a fork.


os.register_at_fork(after_in_child=_after_fork_in_child)
