"""Tests the memory of messages: it is reused once nothing refers to it any more, and never before."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.threads import in_child
from tests.support.waiting import end
from wire.ring.buffers import unwritten, unwritten_tensor

SIZE = 300_000
"""The bytes of a message, for which a buffer of 512 KiB is used."""


KEPT_BYTES = 16 << 20
"""The most bytes that are kept of each buffer size."""


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def next_address() -> int:
    """Returns the address of the next buffer of `SIZE`. The buffer that was returned last is used first."""
    return address(unwritten(SIZE))


def memory_of(view: memoryview) -> weakref.ref[Any]:
    """Returns the memory behind a view. It exists as long as a view refers to it, or while it is kept."""
    assert isinstance(view.obj, np.ndarray)
    return weakref.ref(view.obj.base)


def there(memories: Iterable[weakref.ref[Any]]) -> list[Any]:
    """Returns those objects of weak references that still exist, each once."""
    gc.collect()
    return list({id(found): found for found in (each() for each in memories) if found is not None}.values())


@pytest.mark.parametrize(
    "size", [0, 1, 49, (1 << 16), (1 << 16) + 1, SIZE, 1 << 19, (1 << 20) + 48, 1 << 24, (1 << 24) + 1]
)
def test_as_many_writable_bytes_as_were_asked_for(size: int) -> None:
    view = unwritten(size)
    assert len(view) == view.nbytes == size
    view[:] = bytes(size)
    assert not view.readonly
    assert view.format == "B"


def test_what_nobody_looks_at_is_used_again() -> None:
    view = unwritten(SIZE)
    where = address(view)
    del view
    again = unwritten(SIZE + 17)
    assert address(again) == where
    assert len(again) == SIZE + 17
    assert next_address() != where


@pytest.mark.parametrize("size", [1000, 1 << 16, (1 << 24) + 1])
def test_what_is_small_or_very_large_is_not_kept(size: int) -> None:
    assert there([memory_of(unwritten(size))]) == []


def as_slice(view: memoryview) -> object:
    return view[100:200]


def as_cast(view: memoryview) -> object:
    return view[:400].cast("i")


def as_array(view: memoryview) -> object:
    return np.frombuffer(view, dtype=np.uint8)[100:200][5:]


def as_tensor(view: memoryview) -> object:
    return torch.frombuffer(view, dtype=torch.int32).view(-1, 100)[3:4]


def as_bytes_of_a_tensor(view: memoryview) -> object:
    return torch.frombuffer(view, dtype=torch.int32).view(-1, 100)[2:].numpy().data.cast("B")


@pytest.mark.slow
@pytest.mark.parametrize("keep", [as_slice, as_cast, as_array, as_tensor, as_bytes_of_a_tensor])
def test_what_somebody_looks_at_is_not(keep: Callable[[memoryview], object]) -> None:
    view = unwritten(SIZE)
    where, part = address(view), keep(view)
    del view
    gc.collect()
    other = unwritten(SIZE)
    assert where not in (address(other), next_address())
    del part
    gc.collect()
    assert next_address() == where


def test_a_saved_tensor_of_autograd_keeps_it() -> None:
    rows = unwritten_tensor(300, 250, torch.float32).fill_(3)
    weight = torch.ones(250, 2, requires_grad=True)
    loss, where = (rows @ weight).sum(), rows.data_ptr()
    del rows
    assert unwritten_tensor(300, 250, torch.float32).fill_(7).data_ptr() != where
    loss.backward()
    assert torch.equal(weight.grad, torch.full((250, 2), 900.0))  # type: ignore[arg-type]


def test_a_view_in_a_cycle_goes_back_with_it() -> None:
    view = unwritten(SIZE)
    where = address(view)
    cycle: list[object] = [view]
    cycle.append(cycle)
    del view, cycle
    gc.collect()
    assert next_address() == where


def test_what_is_kept_is_bounded() -> None:
    memories: list[weakref.ref[Any]] = []
    for bits in range(17, 25):
        views = [unwritten(1 << bits) for _ in range((KEPT_BYTES >> bits) + 3)]
        mine = [memory_of(view) for view in views]
        assert len(there(mine)) == len(views)
        del views
        assert len(there(mine)) == KEPT_BYTES >> bits
        memories += mine
    assert sum(each.nbytes for each in there(memories)) == 8 * KEPT_BYTES == 128 << 20


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 576), (512, 576), (3, 3000)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_tensors(shape: tuple[int, int], dtype: torch.dtype) -> None:
    made = unwritten_tensor(*shape, dtype)
    assert (tuple(made.shape), made.dtype, made.is_contiguous()) == (shape, dtype, True)
    made.fill_(3)
    assert bool((made == 3).all())


def test_a_large_tensor_goes_back() -> None:
    made = unwritten_tensor(512, 576, torch.int32)
    where, row = made.data_ptr(), made[5]
    del made
    assert unwritten_tensor(512, 576, torch.int32).data_ptr() != where
    del row
    gc.collect()
    assert unwritten_tensor(512, 576, torch.int32).data_ptr() == where


@pytest.mark.slow
def test_threads_never_share_it() -> None:
    faults: list[int] = []
    memories: list[weakref.ref[Any]] = []

    def work(number: int) -> None:
        held: list[memoryview] = []
        for turn in range(60):
            view = unwritten(SIZE)
            memories.append(memory_of(view))
            np.frombuffer(view, dtype=np.uint8)[:] = number
            held.append(view)
            if turn % 3 == 2:
                faults.extend(number for one in held if bytes(one) != bytes([number]) * SIZE)
                held.clear()
            if turn == 30:
                gc.collect()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        end(threads)
    finally:
        sys.setswitchinterval(before)
    assert faults == []
    assert 0 < len(there(memories)) <= KEPT_BYTES >> 19


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_takes_nothing_from_its_parent() -> None:
    view, kept = unwritten(SIZE), unwritten(SIZE)
    view[:] = bytes([1]) * SIZE
    where = address(kept)
    del kept

    def child() -> str:
        mine = unwritten(SIZE)  # at the same address, in a memory of its own
        mine[:] = view[:] = bytes([2]) * SIZE
        return f"{address(mine) == where}, {next_address() == where}"

    assert in_child(child) == "True, False"
    assert bytes(view) == bytes([1]) * SIZE
    again = unwritten(SIZE)
    assert address(again) == where
    assert bytes(again) != bytes([2]) * SIZE


@pytest.mark.slow
def test_nothing_goes_back_because_the_process_ends() -> None:
    """When the process ends, memory that is still in use is not returned for reuse, since other threads may still write
    to it. `weakref.finalize` would return it, so the code must not use this."""
    code = """
import atexit
atexit.register(lambda: print("again", buffers.unwritten(300_000).obj.ctypes.data == where))  # called after finalizers
import weakref
from wire.ring import buffers
finalize, weakref.finalize = weakref.finalize, None
held = buffers.unwritten(300_000)
weakref.finalize, where = finalize, held.obj.ctypes.data
weakref.finalize(buffers, print, "finalizers have run")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["finalizers have run", "again False"]
