"""This module sets how many cores an operation uses, separately for each thread, and shares the work of one operation
among threads: it cuts the work into pieces, which threads take one after another.

`_SHARED_NUMBERS` and `_SHARED_WORK` are the smallest sizes for which waking another thread saved time in measurements.
`_REGISTER_ROWS` and `_BLOCK_ROWS` are the block sizes of wire/ring/kernels.c.
"""

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

_REGISTER_ROWS, _BLOCK_ROWS = 3, 48
_SHARED_ROWS = 2 * _BLOCK_ROWS
"""The number of rows from which a product is cut by rows; a product of fewer rows is cut by columns. A thread packs
(copies) both operands of its piece. If the product is cut by rows, every thread packs the whole weight, which pays only
if its piece has many rows."""
_SHARED_COLUMNS = 256
_SHARED_NUMBERS = 1 << 18
"""If there are at least this many numbers to encode or decode, other threads help. One thread takes 0.2 ms for this
count."""
_SHARED_WORK = 1 << 24
"""If there are at least this many multiplications, other threads help. One thread takes 0.7 ms for this count, and
waking a thread was measured to take 0.1 ms."""
_VNNI_SPEED = 4
"""The factor by which `_SHARED_WORK` is larger if products use VNNI, with which one thread takes 0.15 ms for 2^24
multiplications. Without the factor, the widest products of 16 rows were shared, and all products of a model took 1.2
times the processor time."""

Tile = tuple[int, int, int, int]
"""A piece of a product: (start row, end row, start column, end column). The ends are not included."""
RowsAndReply = tuple[torch.Tensor, torch.Tensor]
"""A pair of some rows and the memory for their product."""


def row_tiles(num_rows: int, columns: int) -> list[tuple[int, int]]:
    """Cuts the encoding or decoding of `num_rows` rows of `columns` numbers into pieces, which threads take one after
    another. Returns each piece as (first row, number of rows)."""
    num_pieces = 2 * torch.get_num_threads() if num_rows * columns >= _SHARED_NUMBERS else 1
    step = max(1, -(-num_rows // num_pieces))
    return [(start, min(step, num_rows - start)) for start in range(0, num_rows, step)]


def product_tiles(num_rows: int, d: int, m: int, with_vnni: bool = False) -> list[Tile]:
    """Cuts a product into pieces, which threads take one after another. A product that is worth sharing gives
    about two pieces for each thread, so that a core that is busy with other work does not delay it; any other product
    is one piece.

    Args:
        num_rows: the number of rows that are multiplied.
        d, m: the shape of the weight.
        with_vnni: whether the product uses VNNI, the AVX-512 instructions for int8 products.
    """
    num_pieces = 2 * torch.get_num_threads()
    if num_pieces <= 2 or num_rows * d * m < _SHARED_WORK * (_VNNI_SPEED if with_vnni else 1):
        return [(0, num_rows, 0, m)]
    if num_rows >= _SHARED_ROWS:
        step = _step(num_rows, num_pieces, _REGISTER_ROWS)
        return [(start, min(num_rows, start + step), 0, m) for start in range(0, num_rows, step)]
    step = _step(m, num_pieces, _SHARED_COLUMNS)
    return [(0, num_rows, start, min(m, start + step)) for start in range(0, m, step)]


def _step(length: int, num_pieces: int, block: int) -> int:
    return max(1, -(-length // (num_pieces * block))) * block


def row_blocks(
    parts: Sequence[torch.Tensor], replies: Sequence[torch.Tensor], step: int
) -> Iterator[list[RowsAndReply]]:
    """Yields blocks of `step` rows (the last may be smaller) as pairs of rows and memory for their product. A block may
    span several matrices."""
    block: list[RowsAndReply] = []
    room = step
    for rows, reply in zip(parts, replies, strict=True):
        start = 0
        while start < rows.shape[0]:
            stop = min(rows.shape[0], start + room)
            block.append((rows[start:stop], reply[start:stop]))
            room, start = room - (stop - start), stop
            if not room:
                yield block
                block, room = [], step
    if block:
        yield block


Item = TypeVar("Item")

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
    use_cores(1)


def use_cores(count: int) -> None:
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
        use_cores(1)


def return_cores() -> None:
    """Ends `spare_cores`; does nothing if `spare_cores` was not called or the thread had one core."""
    count, _local.spared = getattr(_local, "spared", 0), 0
    if count:
        use_cores(count)


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Makes operations of the calling thread use one core inside the context, and as many as before after it."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    try:
        use_cores(1)
        yield
    finally:
        use_cores(before)


@contextlib.contextmanager
def all_cores() -> Iterator[None]:
    """Lets the calling thread use all of its cores again, for work that is worth sharing between `spare_cores` and
    `return_cores`."""
    count, before = getattr(_local, "spared", 0), torch.get_num_threads()
    if not count:
        yield
        return
    use_cores(count)
    try:
        yield
    finally:
        use_cores(before)  # Inside another such block, `before` is already the number of all cores.


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


def share(work: Callable[[Iterator[Item]], None], items: Sequence[Item]) -> None:
    """Runs `work` in the calling thread and in helper threads, all with one iterator, so that each item goes to one
    thread.

    `work` must keep references to the memory that it writes to: if the calling thread is interrupted, a helper thread
    may finish its item later.

    The number of threads is the number that torch uses in the calling thread. The call does not wait for helper threads
    that are busy with other work. No helper thread spins after its last item, as OpenMP's threads would; a tenant on
    the same machine, or the thread that encrypts, can use that core.

    Raises:
        Whatever `work` raised, after all helper threads that had begun are done with it.
    """
    queue = iter(items)  # This is the iterator of a sequence, whose next() is atomic.
    num_helpers = min(torch.get_num_threads(), len(items)) - 1
    if num_helpers < 1:
        work(queue)
        return
    helpers: list[Future[None]] = []
    try:
        # If the machine has no thread left, or the process is ending, there are fewer helpers.
        with contextlib.suppress(RuntimeError):
            for _ in range(num_helpers):
                helpers.append(_executor().submit(work, queue))
        work(queue)
    finally:
        deque(queue, maxlen=0)  # After an error, a helper that begins late finds nothing to do.
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
    _lock, _made = threading.Lock(), None  # Threads do not survive a fork.


os.register_at_fork(after_in_child=_after_fork_in_child)
