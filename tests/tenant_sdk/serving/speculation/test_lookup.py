"""Tests prompt lookup, which drafts the tokens that followed an earlier occurrence of a text's last tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tenant_sdk.serving.speculation.drafter import continuation

LONGEST = 5


def slow(token_ids: list[int], num_wanted: int) -> list[int]:
    """Returns what `continuation` should return, by comparing the end of the text with every earlier position."""
    for size in range(LONGEST, 0, -1):
        for place in range(len(token_ids) - size - 1, -1, -1):
            if token_ids[place : place + size] == token_ids[-size:]:
                text = list(token_ids)
                for number in range(num_wanted):
                    text.append(text[place + size + number])
                return text[len(token_ids) :]
    return []


@given(st.lists(st.sampled_from([0, 1, 256, 65_536, 257]), max_size=40), st.integers(0, 9))
def test_it_is_what_a_slow_search_finds(token_ids: list[int], num_wanted: int) -> None:
    """The fast search compares bytes. Some of these numbers, side by side, contain the bytes of another number, which
    must not count as a match."""
    assert continuation(token_ids, num_wanted) == slow(token_ids, num_wanted)


def test_the_longest_end_counts_and_then_the_last_place() -> None:
    assert continuation([1, 2, 3, 4, 9, 3, 5, 2, 3], 2) == [4, 9]
    assert continuation([3, 4, 9, 3, 5, 3], 2) == [5, 3]


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    assert continuation([7, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert continuation([7, 7], 3) == [7, 7, 7]


def test_nothing_is_drafted_after_a_new_token_or_when_nothing_is_wanted() -> None:
    assert continuation([1, 2, 3], 4) == []
    assert continuation([], 4) == []
    assert continuation([1, 1], 0) == []
    assert continuation([1, 1], -1) == []
