"""Tests which rows the engine computes next. The scheduler decides without tensors and threads, at times that the test
sets."""

from __future__ import annotations

import ast
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenant_sdk.serving import scheduler as scheduler_module
from tenant_sdk.serving.scheduler import PAGE_TOKENS, Budget, Scheduler, Step, reserved_tokens
from wire.errors import ConfigurationError


@dataclass
class Adapter:
    adapter_index: int = 0
    ready: bool = True

    def is_ready(self) -> bool:
        return self.ready


READY = Adapter()


def scheduler(**changes: int | float) -> Scheduler:
    return Scheduler(Budget(**{"step_tokens": 8, "max_running": 4, "kv_bytes": 100, "overtaking_s": 2.0, **changes}))  # type: ignore[arg-type]


def rows(step: Step) -> dict[int, tuple[int, int]]:
    return {segment.request: (segment.start, segment.stop) for segment in step.segments}


def run(made: Scheduler, now: float = 0.0) -> Step:
    """Lets the scheduler plan one step and marks it as done: each request that is due to sample gets a token."""
    step = made.plan(now)
    made.advance(step)
    for segment in step.segments:
        if segment.samples:
            made.append(segment.request)
    return step


def test_it_is_pure() -> None:
    """The scheduler imports none of the standard library's clocks, threads and random numbers, and of this repository
    only the errors and the check of a setting."""
    tree = ast.parse(Path(scheduler_module.__file__).read_text(encoding="utf-8"))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    own = {"tenant_sdk.plain_values", "wire.errors"}
    assert imported == {"__future__", "collections", "collections.abc", "dataclasses", "heapq", "typing", *own}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import)]


def test_rows_that_need_no_computing_are_asked_for_at_admission() -> None:
    made, asked = scheduler(max_running=1), []

    def known() -> int:
        asked.append(made.num_running)
        return 5

    made.add(0, 7, 1, READY)
    made.add(1, 12, 1, READY, start=known)
    assert rows(run(made)) == {0: (0, 7)}
    assert not asked
    made.remove(0)
    assert rows(run(made)) == {1: (5, 12)}
    assert rows(run(made)) == {1: (12, 13)}
    assert len(asked) == 1


def test_nothing_to_do_is_an_empty_step() -> None:
    assert scheduler().plan(0.0) == Step(())


def test_a_prompt_goes_in_pieces_beside_an_answer_that_gets_a_row_in_every_step() -> None:
    made = scheduler()
    made.add(1, 2, 10, READY)
    assert rows(run(made)) == {1: (0, 2)}
    made.add(2, 20, 10, READY)
    seen = [run(made) for _ in range(4)]
    assert [rows(step)[2] for step in seen] == [(0, 7), (7, 14), (14, 20), (20, 21)]
    assert [rows(step)[1] for step in seen] == [(2, 3), (3, 4), (4, 5), (5, 6)]
    assert [segment.samples for step in seen for segment in step.segments if segment.request == 2] == [
        False, False, True, True,
    ]  # fmt: skip


def test_the_oldest_prompt_gets_half_and_the_shortest_the_rest() -> None:
    made = scheduler()
    made.add(1, 100, 10, READY)
    made.add(2, 50, 10, READY)
    made.add(3, 3, 10, READY)
    assert rows(run(made)) == {1: (0, 4), 2: (0, 1), 3: (0, 3)}
    assert rows(run(made)) == {1: (4, 8), 2: (1, 4), 3: (3, 4)}


def test_the_oldest_prompt_ends_however_many_short_ones_come() -> None:
    made = scheduler()
    made.add(0, 40, 10, READY)
    for number in range(1, 11):
        made.add(number, 7, 10, READY)
        run(made)
        made.remove(number)
    assert 0 not in made.waiting()
    assert rows(run(made))[0][1] > 40


def test_rows_are_sorted_by_adapter_index() -> None:
    made = scheduler()
    for number, index in enumerate((3, 0, 2)):
        made.add(number, 2, 10, Adapter(index))
    step = made.plan(0.0)
    assert [segment.request for segment in step.segments] == [1, 2, 0]
    assert step.index_of_row == [0, 0, 2, 2, 3, 3]
    assert step.num_rows == 6


def test_an_adapter_that_is_loading_keeps_nobody_else_waiting() -> None:
    made, loading = scheduler(), Adapter(5, ready=False)
    made.add(1, 2, 10, loading)
    made.add(2, 2, 10, READY)
    assert rows(run(made)) == {2: (0, 2)}
    loading.ready = True
    assert rows(run(made)) == {2: (2, 3), 1: (0, 2)}


def test_requests_wait_for_a_place_and_for_memory() -> None:
    made = scheduler(max_running=2)
    for number in range(3):
        made.add(number, 1, 10, READY)
    assert set(rows(run(made))) == {0, 1}
    made.remove(0)
    assert set(rows(run(made))) == {1, 2}
    full = scheduler(kv_bytes=25)
    for number in range(3):
        full.add(number, 1, 10, READY)
    assert set(rows(run(full))) == {0, 1}
    assert full.reserved_bytes == 20
    full.remove(1)
    assert set(rows(run(full))) == {0, 2}


def test_a_large_request_is_overtaken_for_a_while_and_then_goes_first() -> None:
    made = scheduler()
    made.add(0, 1, 60, READY)
    run(made, 0.0)
    made.add(1, 1, 70, READY)
    made.add(2, 1, 20, READY)
    assert set(rows(run(made, 1.0))) == {0, 2}
    made.add(3, 1, 20, READY)
    assert set(rows(run(made, 2.9))) == {0, 2, 3}
    made.remove(3)
    made.add(4, 1, 20, READY)
    assert set(rows(run(made, 3.0))) == {0, 2}, "two seconds after it was found too large, nobody goes before it"
    made.remove(0)
    assert set(rows(run(made, 3.1))) == {1, 2}, "it is admitted as soon as it fits; what came later waits for memory"
    made.remove(2)
    assert set(rows(run(made, 3.2))) == {1, 4}


# ---- memory that grows -----------------------------------------------------------------------------------------------


def add_growing(made: Scheduler, number: int, num_prompt: int, most: int, caller: str = "") -> None:
    """Adds a request that grows, with one byte of KV for each token."""
    made.add(number, num_prompt, most, READY, caller, bytes_for=lambda num_tokens: num_tokens)


@given(st.integers(1, 1 << 20))
def test_pages_hold_what_they_are_for_and_not_much_more(num_tokens: int) -> None:
    reserved = reserved_tokens(num_tokens)
    assert reserved % PAGE_TOKENS == 0
    assert num_tokens <= reserved < num_tokens + max(PAGE_TOKENS, num_tokens / 8 + 1)


def test_sixteen_requests_that_may_fill_the_context_run_where_two_would_fit_in_whole() -> None:
    context = 128
    for grows, num_running in ((True, 16), (False, 2)):
        made = scheduler(step_tokens=16, max_running=16, kv_bytes=2 * context)
        for number in range(16):
            if grows:
                add_growing(made, number, 1, context)
            else:
                made.add(number, 1, context, READY)
        assert len(run(made).segments) == num_running


def test_the_last_to_begin_gives_way_and_begins_again_before_others() -> None:
    made = scheduler(kv_bytes=3 * PAGE_TOKENS)
    for number in range(3):
        add_growing(made, number, PAGE_TOKENS // 2, 3 * PAGE_TOKENS)
    seen = [run(made) for _ in range(40)]
    assert made.waiting() == [1, 2], "each asked for a second page in turn, and the first has all"
    preempted = [number for step in seen for number in step.preempted]
    assert preempted == [2, 1, 2], "2 overtook 1 while that did not fit"
    assert rows(seen[-1]).keys() == {0}
    add_growing(made, 3, 1, 2 * PAGE_TOKENS)
    made.add(4, 1, 2 * PAGE_TOKENS, READY)
    made.remove(0)
    assert rows(made.plan(100.0))[1] == (0, 7), "it begins again at its first row, before what came later"
    assert made.waiting() == [2, 4]
    assert made.num_preemptions == 3


def test_who_gave_way_is_before_those_who_waited_already() -> None:
    made = scheduler(kv_bytes=2 * PAGE_TOKENS, max_running=2)
    for number in range(3):
        add_growing(made, number, PAGE_TOKENS // 2, 2 * PAGE_TOKENS)
    assert any(run(made).preempted == (1,) for _ in range(20))
    assert made.waiting() == [1, 2]


def test_a_request_that_does_not_grow_is_never_preempted() -> None:
    made = scheduler(kv_bytes=4 * PAGE_TOKENS)
    add_growing(made, 0, 1, 4 * PAGE_TOKENS)
    made.add(1, 1, 3 * PAGE_TOKENS, READY)
    seen = [run(made) for _ in range(PAGE_TOKENS + 2)]
    assert [number for step in seen for number in step.preempted] == [0]
    assert made.waiting() == [0]
    made.remove(1)
    assert rows(run(made))[0][0] == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 120), st.booleans()), min_size=2, max_size=8),
    st.randoms(use_true_random=False),
    st.integers(0, 2),
)
def test_requests_that_grow_all_end_within_the_memory(
    requests: list[tuple[int, int, bool]], random: object, num_drafted: int
) -> None:
    """In every mix, each row is computed in order, after a preemption from the first one on. A row never lies beyond
    the memory that its request has, and nobody waits for ever."""
    made = scheduler(step_tokens=32, max_running=6, kv_bytes=190, num_drafted=num_drafted)
    fresh, read = list(range(len(requests))), dict.fromkeys(range(len(requests)), 0)
    known = {number: prompt for number, (prompt, _, _) in enumerate(requests)}
    left = {number: new for number, (_, new, _) in enumerate(requests)}
    for now in range(5_000):
        if fresh and random.random() < 0.3:  # type: ignore[attr-defined]
            prompt, new, grows = requests[number := fresh.pop(0)]
            made.add(number, prompt, prompt + new - 1, READY, bytes_for=(lambda each: each) if grows else None)
        step = made.plan(float(now))
        assert made.reserved_bytes <= 190
        assert all(requests[number][2] for number in step.preempted)
        read |= dict.fromkeys(step.preempted, 0)
        made.advance(step)
        for segment in step.segments:
            assert segment.start == read[segment.request]
            most = sum(requests[segment.request][:2]) - 1
            has = most if segment.kv_tokens is None else min(segment.kv_tokens, most)
            assert min(segment.stop + segment.num_drafted, most) <= has
            read[segment.request] = segment.stop
            if segment.samples:
                assert segment.stop == known[segment.request]
                num_new = random.randint(1, min(left[segment.request], 1 + segment.num_drafted))  # type: ignore[attr-defined]
                left[segment.request] -= num_new
                known[segment.request] += num_new
                read[segment.request] += num_new - 1
                if left[segment.request]:
                    made.append(segment.request, num_new)
                else:
                    made.remove(segment.request)
        if not fresh and made.num_running == made.num_waiting == 0:
            break
    assert set(left.values()) == {0}


def test_callers_share_the_places() -> None:
    made = scheduler()
    for number in range(10):
        made.add(number, 1, 1, READY, caller="busy")
    made.add(10, 1, 1, READY, caller="other")
    made.add(11, 1, 1, READY, caller="third")
    assert set(rows(run(made))) == {0, 1, 10, 11}
    made.remove(10)
    made.add(12, 1, 1, READY, caller="other")
    assert set(rows(run(made))) == {0, 1, 11, 12}


def test_turns_of_many_callers_are_found_without_comparing_all_of_them_for_each() -> None:
    """10,000 requests of as many callers wait for an adapter. With a comparison of all callers for each turn, this
    would take 50,000,000 comparisons, and several seconds of every step."""
    made = scheduler()
    for number in range(10_000):
        made.add(number, 4, 10, Adapter(ready=False), str(number))
    began = time.process_time()
    assert made.plan(0.0).segments == ()
    assert time.process_time() - began < 1.0


def test_what_was_removed_is_gone() -> None:
    made = scheduler()
    made.add(1, 20, 10, READY)
    step = made.plan(0.0)
    made.remove(1)
    made.advance(step)
    assert (made.num_running, made.num_waiting, made.reserved_bytes) == (0, 0, 0)
    made.remove(1)
    assert made.plan(0.0) == Step(())


def test_a_request_larger_than_the_budget_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs 101 bytes of KV, the engine has 100"):
        scheduler().add(1, 1, 101, READY)


@pytest.mark.parametrize(
    "changes",
    [
        {"step_tokens": 0},
        {"max_running": True},
        {"kv_bytes": -1},
        {"step_tokens": 3},
        {"overtaking_s": -1},
        {"overtaking_s": "2"},
        {"overtaking_s": float("nan")},
    ],
)
def test_budgets_that_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(changes))):
        scheduler(**changes)


def test_an_answer_has_rows_for_drafted_tokens_in_every_step_and_a_prompt_has_none() -> None:
    made = scheduler(step_tokens=12, max_running=2, num_drafted=3)
    made.add(1, 1, 10, READY)
    assert [segment.num_rows for segment in run(made).segments] == [1], "one row of a prompt is no answer"
    made.add(2, 20, 10, READY)
    for _ in range(2):
        step = run(made)
        assert {segment.request: (segment.num_rows, segment.num_drafted) for segment in step.segments} == {
            1: (4, 3), 2: (8, 0),
        }  # fmt: skip
        assert step.num_rows == len(step.index_of_row) == 12
    assert {segment.request: segment.num_wanted for segment in made.plan(0.0).segments} == {1: 4, 2: 1}


def test_accepted_tokens_are_read_and_the_rows_of_others_are_computed_again() -> None:
    made = scheduler(num_drafted=1)
    made.add(1, 5, 10, READY)
    run(made)
    for num_new, want in ((1, (5, 6)), (2, (6, 7)), (2, (8, 9)), (1, (10, 11))):
        step = made.plan(0.0)
        assert rows(step) == {1: want}
        made.advance(step)
        made.append(1, num_new)


def test_a_step_has_room_for_drafted_rows_of_all_answers() -> None:
    scheduler(step_tokens=16, max_running=4, num_drafted=3)
    with pytest.raises(
        ConfigurationError, match=r"step_tokens \(16\) .*max_running \(4\) times 1 \+ num_drafted \(5\)"
    ):
        scheduler(step_tokens=16, max_running=4, num_drafted=4)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6), st.integers(0, 3), st.sampled_from("ab")), max_size=12),
    st.randoms(use_true_random=False),
    st.integers(0, 1),
)
def test_every_request_gets_each_of_its_rows_once_in_order(
    requests: list[tuple[int, int, int, str]], random: object, num_drafted: int
) -> None:
    """Requests join at random times. In every mix, no row is left out or repeated, and budgets are kept.

    Drafted tokens are accepted at random, and accepted tokens are not computed again.
    """
    made = scheduler(kv_bytes=60, num_drafted=num_drafted)
    due = {number: each for number, each in enumerate(requests)}
    fresh, read, answered = list(due), dict.fromkeys(due, 0), dict.fromkeys(due, 0)
    for now in range(2_000):
        if fresh and random.random() < 0.3:  # type: ignore[attr-defined]
            number = fresh.pop(0)
            prompt, new, index, caller = due[number]
            made.add(number, prompt, prompt + new, Adapter(index), caller)
        was_decoding = {n for n, each in due.items() if answered[n] and read[n] < each[0] + each[1] - 1}
        step = made.plan(float(now))
        assert step.num_rows <= 8
        assert made.num_running <= 4
        assert made.reserved_bytes <= 60
        assert step.index_of_row == sorted(step.index_of_row)
        assert was_decoding <= set(rows(step)), "an answer that has begun never misses a step"
        made.advance(step)
        for segment in step.segments:
            assert segment.start == read[segment.request]
            assert segment.num_drafted == (num_drafted if answered[segment.request] else 0)
            read[segment.request] = segment.stop
            if segment.samples:
                left = due[segment.request][1] - answered[segment.request]
                num_new = random.randint(1, min(left, 1 + segment.num_drafted))  # type: ignore[attr-defined]
                answered[segment.request] += num_new
                read[segment.request] += num_new - 1
                if num_new == left:
                    made.remove(segment.request)
                else:
                    made.append(segment.request, num_new)
        if not fresh and made.num_running == made.num_waiting == 0:
            break
    assert answered == {number: each[1] for number, each in due.items()}
    assert read == {number: each[0] + each[1] - 1 for number, each in due.items()}
