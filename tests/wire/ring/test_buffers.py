"""Memory of messages: used again once nobody looks at it, never before."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.waiting import end
from wire.ring import buffers
from wire.ring.buffers import unwritten, unwritten_tensor

SIZE = 300_000
"""Bytes: 512 KiB are taken for it."""


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    gc.collect()
    for free in buffers._free.values():
        free.clear()


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def num_kept() -> int:
    return sum(len(free) for free in buffers._free.values())


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
    assert num_kept() == 1
    again = unwritten(SIZE + 17)
    assert address(again) == where
    assert len(again) == SIZE + 17
    assert num_kept() == 0


@pytest.mark.parametrize("size", [1000, 1 << 16, (1 << 24) + 1])
def test_what_is_small_or_very_large_is_not_kept(size: int) -> None:
    unwritten(size)
    assert num_kept() == 0


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
    assert num_kept() == 0
    other = unwritten(SIZE)
    assert address(other) != where
    del part
    gc.collect()
    assert num_kept() == 1


def test_a_saved_tensor_of_autograd_keeps_it() -> None:
    rows = unwritten_tensor(300, 250, torch.float32).fill_(3)
    weight = torch.ones(250, 2, requires_grad=True)
    loss = (rows @ weight).sum()
    del rows
    assert num_kept() == 0
    unwritten_tensor(300, 250, torch.float32).fill_(7)
    loss.backward()
    assert torch.equal(weight.grad, torch.full((250, 2), 900.0))  # type: ignore[arg-type]


def test_a_view_in_a_cycle_goes_back_with_it() -> None:
    cycle: list[object] = [unwritten(SIZE)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert num_kept() == 1


def test_what_is_kept_is_bounded() -> None:
    for bits in range(buffers._LEAST_BITS, buffers._MOST_BITS + 1):
        views = [unwritten(1 << bits) for _ in range((buffers._KEPT_BYTES >> bits) + 3)]
        del views
        assert len(buffers._free[bits]) == buffers._KEPT_BYTES >> bits
    kept = sum(array.nbytes for free in buffers._free.values() for array in free)
    assert kept == 8 * buffers._KEPT_BYTES == 128 << 20


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
    assert where in {array.ctypes.data for array in buffers._free[21]}


@pytest.mark.slow
def test_threads_never_share_it() -> None:
    faults: list[int] = []

    def work(number: int) -> None:
        held: list[memoryview] = []
        for turn in range(60):
            view = unwritten(SIZE)
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
    assert 0 < num_kept() <= buffers._KEPT_BYTES >> 19


def test_a_forked_child_takes_nothing_from_its_parent() -> None:
    view, kept = unwritten(SIZE), unwritten(SIZE)
    view[:] = bytes([1]) * SIZE
    where = address(kept)
    del kept
    assert num_kept() == 1
    child = os.fork()
    if not child:
        status = 1
        try:
            mine = unwritten(SIZE)  # at the same address, in a memory of its own
            mine[:] = view[:] = bytes([2]) * SIZE
            status = 0 if address(mine) == where and num_kept() == 0 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bytes(view) == bytes([1]) * SIZE
    assert bytes(unwritten(SIZE)) != bytes([2]) * SIZE


@pytest.mark.slow
def test_nothing_goes_back_because_the_process_ends() -> None:
    """Other threads may still write. `weakref.finalize` calls what is left, so nothing may be left to it."""
    code = """
import atexit
atexit.register(lambda: print("kept", sum(map(len, buffers._free.values()))))  # first, so called after all finalizers
import weakref
from wire.ring import buffers
before = len(weakref.finalize._registry)
held = buffers.unwritten(300_000)
print("added", len(weakref.finalize._registry) - before)
weakref.finalize(buffers, print, "finalizers have run")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["added 0", "finalizers have run", "kept 0"]
