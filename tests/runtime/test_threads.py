"""Tests that one thread can be limited to one core: its own operations are limited, in whichever library, and those of
other threads are not."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.threads import Workers, one_core, return_cores, share, spare_cores, use_one_core
from tests.support.waiting import WAIT_S, end

TORCH_CPU = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
HAS_GOMP = bool(list(TORCH_CPU.parent.glob("libgomp*.so*")))


def mkl_threads() -> int:
    """Returns how many threads MKL would use in this thread; 0 if torch has no MKL."""
    return int(getattr(ctypes.CDLL(str(TORCH_CPU)), "MKL_Get_Max_Threads", int)()) if TORCH_CPU.exists() else 0


def counts() -> tuple[int, int]:
    return torch.get_num_threads(), mkl_threads()


@pytest.fixture
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(not HAS_GOMP, reason="this torch has no libgomp of its own")
@pytest.mark.usefixtures("_two_threads")
def test_only_the_thread_that_asks_is_alone() -> None:
    seen: list[tuple[int, int]] = []

    def run() -> None:
        use_one_core()
        seen.append(counts())

    before = counts()
    thread = threading.Thread(target=run)
    thread.start()
    end(thread)
    assert seen == [(1, min(1, before[1]))]
    assert counts() == before
    assert before[0] == 2


@pytest.mark.skipif(not HAS_GOMP, reason="this torch has no libgomp of its own")
@pytest.mark.usefixtures("_two_threads")
def test_workers_that_start_in_a_step_of_one_core_leave_other_threads_theirs() -> None:
    """Masks may be made for the first time inside a decode step, in which the calling thread has one core."""
    later: list[int] = []
    spare_cores()
    try:
        assert Workers("one").submit(torch.get_num_threads).result(WAIT_S) == 1
    finally:
        return_cores()
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    end(thread)
    assert later == [2]


def test_work_of_one_kind_does_not_wait_for_work_of_another() -> None:
    one, other, release = Workers("one"), Workers("other"), threading.Event()
    held = [one.submit(release.wait, WAIT_S) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        assert other.submit(lambda: "done").result(WAIT_S) == "done"
        assert not any(each.done() for each in held)
    finally:
        release.set()


def taking(taken: list[tuple[int, str]], meet: threading.Barrier | None = None) -> Callable[[Iterator[int]], None]:
    """Returns work that notes each item and the thread that took it. With a barrier, items are taken only when that
    many threads each have one."""

    def work(items: Iterator[int]) -> None:
        for item in items:
            taken.append((item, threading.current_thread().name))
            if meet is not None:
                meet.wait(WAIT_S)

    return work


def test_each_item_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=num_threads: count)
        for num_items in (0, 1, 2, 100):
            taken: list[tuple[int, str]] = []
            share(taking(taken), list(range(num_items)))
            assert sorted(item for item, _ in taken) == list(range(num_items))


def test_helpers_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    taken: list[tuple[int, str]] = []
    share(taking(taken, threading.Barrier(2)), [0, 1])
    assert len({name for _, name in taken}) == 2


def test_one_thread_works_in_the_callers() -> None:
    names: list[str] = []

    def run() -> None:
        use_one_core()
        taken: list[tuple[int, str]] = []
        share(taking(taken), [0, 1, 2])
        names.extend(name for _, name in taken)

    thread = threading.Thread(target=run, name="caller")
    thread.start()
    end(thread)
    assert names == ["caller"] * 3


def test_a_busy_helper_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    num_helpers = os.cpu_count() or 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_helpers + 1)
    release, all_busy = threading.Event(), threading.Barrier(num_helpers + 2)

    def hold(items: Iterator[int]) -> None:
        for _ in items:
            all_busy.wait(WAIT_S)
            release.wait(WAIT_S)

    other = threading.Thread(target=share, args=(hold, list(range(num_helpers + 1))))
    other.start()
    all_busy.wait(WAIT_S)
    try:
        taken: list[tuple[int, str]] = []
        share(taking(taken), [0, 1, 2])
        assert [name for _, name in taken] == [threading.current_thread().name] * 3
    finally:
        release.set()
    end(other)


def test_an_error_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    meet = threading.Barrier(2)

    def work(items: Iterator[int]) -> None:
        for item in items:
            meet.wait(WAIT_S)
            if item:
                raise ValueError("the second")

    with pytest.raises(ValueError, match="the second"):
        share(work, [0, 1])


def refuse_after(allowed: int, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Makes the machine refuse further threads after `allowed` more have started. Returns a list of the work that was
    queued for threads that never started."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    submit, left, queued = ThreadPoolExecutor.submit, [allowed], list[Callable[[], object]]()

    def refusing(executor: ThreadPoolExecutor, work: Callable[..., Any], *given: Any) -> Future[Any]:
        if left[0]:
            left[0] -= 1
            return submit(executor, work, *given)
        queued.append(lambda: work(*given))  # as ThreadPoolExecutor does: queued, and then the error
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refusing)
    return queued


@pytest.mark.parametrize("allowed", [0, 1])
def test_without_another_thread_less_help(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    queued = refuse_after(allowed, monkeypatch)
    taken: list[tuple[int, str]] = []
    share(taking(taken), list(range(50)))
    assert sorted(item for item, _ in taken) == list(range(50))
    assert len(queued) == 1
    queued[0]()
    assert len(taken) == 50, "who begins late finds nothing to do"


def test_what_was_queued_and_begins_in_time_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread can be started, which `submit` says after it has queued the work. A thread that was busy until then
    takes that work at once, and takes long for its item."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    began, late = threading.Event(), list[threading.Thread]()

    def refusing(_: ThreadPoolExecutor, work: Callable[..., Any], *given: Any) -> Future[Any]:
        late.append(threading.Thread(target=work, args=given))
        late[0].start()
        assert began.wait(WAIT_S)
        raise RuntimeError("can't start new thread")

    def work(items: Iterator[int]) -> None:
        for item in items:
            if threading.current_thread() in late:
                began.set()
                time.sleep(0.2)
            done.append(item)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refusing)
    done: list[int] = []
    share(work, list(range(4)))
    assert sorted(done) == [0, 1, 2, 3]
    end(late)


def test_after_an_error_nobody_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives while the caller works. Items that no helper thread has begun by then are not processed."""
    queued = refuse_after(0, monkeypatch)
    taken: list[int] = []

    def work(items: Iterator[int]) -> None:
        for item in items:
            taken.append(item)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        share(work, [0, 1, 2])
    queued[0]()
    assert taken == [0]


@pytest.mark.slow
def test_a_thread_that_outlives_the_main_one_still_multiplies() -> None:
    code = """
import threading, time, torch
from runtime import threads
torch.set_num_threads(2)
def late():
    threading.main_thread().join()
    time.sleep(0.5)
    taken = []
    threads.share(lambda items: taken.extend(items), list(range(9)))
    print(len(taken))
threading.Thread(target=late).start()
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=90)
    assert done.stdout == "9\n", done.stderr[-500:]


def test_a_forked_child_has_helpers_of_its_own() -> None:
    code = """
import os, threading, torch
from runtime.threads import share
torch.set_num_threads(2)
def both():
    meet, names = threading.Barrier(2), set()
    def work(items):
        for _ in items:
            meet.wait(30)
            names.add(threading.current_thread().name)
    share(work, [0, 1])
    return len(names)
assert both() == 2
child = os.fork()
if not child:
    os._exit(0 if both() == 2 else 1)
print(os.waitpid(child, 0)[1])
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=90)
    assert done.stdout == "0\n", done.stderr[-500:]


def test_one_core_is_for_a_while() -> None:
    before = torch.get_num_threads()
    inside = []

    def interrupted() -> None:
        with one_core():
            inside.append(torch.get_num_threads())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert inside == [1]
    assert torch.get_num_threads() == before


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="needs two cores")
def test_one_core_inside_a_step_of_one_core() -> None:
    before = torch.get_num_threads()
    spare_cores()
    try:
        with one_core():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 1
    finally:
        return_cores()
    assert torch.get_num_threads() == before
