"""Tests worker threads: every item is processed once, errors reach the caller, and operations of other threads use as
many cores as before."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from noise.blocks.pool import alone, share
from tests.support.threads import in_child
from tests.support.waiting import end


@pytest.fixture(params=[1, 2, 4])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with of_torch(request.param):
        yield request.param


@contextlib.contextmanager
def of_torch(count: int) -> Iterator[None]:
    """Makes torch use `count` threads inside the context. It is torch's real number, since `share` puts it back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_every_item_goes_to_one_thread(num_threads: int, count: int) -> None:
    seen: list[int] = []

    def work(queue: Iterator[int]) -> None:
        for item in queue:
            seen.append(item)

    share(work, range(count))
    assert sorted(seen) == list(range(count))


def test_one_thread_means_the_calling_thread() -> None:
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        share(lambda queue: seen.append((threading.get_ident(), list(queue))), range(3))
    finally:
        torch.set_num_threads(before)
    assert seen == [(threading.get_ident(), [0, 1, 2])]


def number_in_a_new_thread() -> int:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    end(thread)
    return seen[0]


def test_workers_compute_alone_and_others_as_before(num_threads: int) -> None:
    counts: list[int] = []

    def work(queue: Iterator[int]) -> None:
        counts.extend(torch.get_num_threads() for _ in queue)

    share(work, range(8))
    assert set(counts) == {1}
    assert torch.get_num_threads() == num_threads
    assert number_in_a_new_thread() == num_threads


def test_the_first_error_comes_back_after_all_have_ended(num_threads: int) -> None:
    begun, ended = [], []

    def work(queue: Iterator[int]) -> None:
        begun.append(threading.get_ident())
        try:
            for item in queue:
                time.sleep(0.01)  # long enough for other threads to begin
                if item == 0:
                    raise KeyError("first")
        finally:
            ended.append(threading.get_ident())

    with pytest.raises(KeyError, match="first"):
        share(work, range(4 * num_threads))
    assert sorted(begun) == sorted(ended)
    share(work, range(1, 3))  # the workers still run


def test_callers_may_be_many() -> None:
    totals: list[int] = []

    def call() -> None:
        seen: list[int] = []
        share(seen.extend, range(500))
        totals.append(sum(seen))

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    end(threads)
    assert totals == [sum(range(500))] * 6


def test_work_may_write_to_tensors_of_either_kind() -> None:
    """Worker threads can write to the caller's tensors, also if the caller is in inference mode. Such tensors can be
    written only in this mode."""
    for mode in (True, False):
        with torch.inference_mode(mode):
            out = torch.zeros(64)

            def work(queue: Iterator[int], out: torch.Tensor = out) -> None:
                for item in queue:
                    out[item : item + 1] += 1

            share(work, range(64))
            assert bool((out == 1).all())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_no_workers_to_wait_for() -> None:
    alone(lambda: None)  # starts the parent's workers

    def child() -> str:
        seen: list[int] = []
        share(seen.extend, range(50))
        return f"{len(seen)} items, {alone(lambda: 'alone')}"

    with of_torch(2):
        assert in_child(child) == "50 items, alone"


@pytest.mark.parametrize("allowed", [0, 1])
def test_without_another_thread_less_help(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    alone(lambda: None)  # starts the workers
    submit, left = ThreadPoolExecutor.submit, [allowed]

    def refusing(executor: ThreadPoolExecutor, *given: Any) -> Future[Any]:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        return submit(executor, *given)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refusing)
    seen: list[int] = []
    with of_torch(4):
        share(lambda queue: seen.extend(queue), range(50))
    assert sorted(seen) == list(range(50))
    assert left == [0]
