"""Tests how many calls a caller may have open, alone and beside many other callers."""

from __future__ import annotations

from provider.net.admission import MAX_CALLS_PER_TENANT, Calls


def test_a_caller_has_so_many_calls_and_no_more() -> None:
    calls = Calls(64)
    assert all(calls.take_place("acme") for _ in range(MAX_CALLS_PER_TENANT))
    assert not calls.take_place("acme")
    assert calls.counts() == {"acme": MAX_CALLS_PER_TENANT}
    assert calls.take_place("another")
    calls.leave("acme")
    assert calls.take_place("acme")


def test_many_that_take_all_they_can_leave_a_thread_for_the_next() -> None:
    calls = Calls(64)
    for number in range(19):
        while calls.take_place(f"t{number}"):
            pass
    counts = calls.counts()
    assert [counts[f"t{number}"] for number in range(19)] == [MAX_CALLS_PER_TENANT] * 4 + [2] * 15
    assert calls.take_place("next")
    for caller, count in calls.counts().items():
        for _ in range(count):
            calls.leave(caller)
    assert calls.counts() == {}
    assert all(calls.take_place("t0") for _ in range(MAX_CALLS_PER_TENANT))


def test_a_call_that_is_refused_takes_nothing() -> None:
    calls = Calls(2)
    assert [calls.take_place("acme") for _ in range(4)] == [True, True, False, False]
    assert calls.counts() == {"acme": 2}
    for _ in range(2):
        calls.leave("acme")
    assert calls.counts() == {}


def test_counts_are_a_copy() -> None:
    calls = Calls(64)
    before = calls.counts()
    calls.take_place("acme")
    assert before == {}
