"""Threads that make masks: each computes alone on one core, and they share a queue of pieces.

torch's own threads do not suit: an operation on a chunk of mask takes 100 µs, and OpenMP makes its threads wait for
each other, spinning, after every one of them. Where anything else computes on the same cores (the model, a provider on
the same machine) that took 20 to 100 times as long. Pieces that never wait for each other lose only the time that the
other work takes.
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
    """Runs `work` in several threads at once, on one iterator: each item goes to one of them.

    As many threads work as torch uses in the calling thread (`torch.set_num_threads`); with one, or one item, the
    calling thread itself works. Gradients are off in `work`.

    Raises:
        Whatever `work` raised first, after all threads have ended.
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
        with contextlib.suppress(RuntimeError):  # No thread is left in the machine, or the process ends.
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
    """Runs `work` in one of the threads, for an operation that torch, or MKL's FFT, would share in the calling thread.

    Such a thread team spins afterwards, on the cores that the pieces of the next step need: that costs a third of their
    time.
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
    """Makes workers in which a torch operation uses one thread, and changes nothing for any other thread.

    torch keeps the number both for the calling thread and, for threads that have not computed yet, for the process.
    """
    before = torch.get_num_threads()
    all_started = threading.Barrier(num_workers)

    def start() -> None:
        torch.get_num_threads()  # This takes the process's number now, not at the first operation.
        torch.set_num_threads(1)
        all_started.wait()

    executor = ThreadPoolExecutor(num_workers, thread_name_prefix="veilbase-masks", initializer=start)
    try:
        for _ in range(num_workers):
            executor.submit(int)
        # The barrier is passed when every thread has its number; only then is the process's number restored.
        executor.submit(int).result()
    except RuntimeError:
        all_started.abort()  # The threads that did start would wait for the others.
        raise
    finally:
        torch.set_num_threads(before)
    return executor


def _after_fork_in_child() -> None:
    global _lock, _made
    _lock, _made = threading.Lock(), None  # Threads do not survive a fork.


os.register_at_fork(after_in_child=_after_fork_in_child)
