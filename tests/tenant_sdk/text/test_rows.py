"""Tests padding to a given number of tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tenant_sdk.text.rows import CutWarning, bucket_tokens, check_fits, padded_prompt, padded_row
from wire.errors import ConfigurationError


@pytest.mark.parametrize(("given", "bucket"), [(False, None), (True, 512), (64, 64), (2, 2)])
def test_buckets(given: Any, bucket: int | None) -> None:
    assert bucket_tokens(given) == bucket


@pytest.mark.parametrize("given", [0, 1, -5, 2.5, "64", 1 << 21, [64]])
def test_buckets_that_cannot_be(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="is True, False or a number"):
        bucket_tokens(given)


@pytest.mark.parametrize("length", [0, 1, 3, 4])
def test_a_prompt_takes_the_whole_bucket(length: int) -> None:
    ids, seen = padded_prompt(list(range(5, 5 + length)), 4, pad=0)
    assert len(ids) == len(seen) == 4
    assert sum(seen) == max(length, 1)
    assert [token for token, visible in zip(ids, seen, strict=True) if visible][:length] == list(range(5, 5 + length))


def test_a_longer_prompt_is_cut_and_said_to_be() -> None:
    with pytest.warns(CutWarning, match="has 6 tokens, pad_rows keeps the last 4"):
        ids, seen = padded_prompt([1, 2, 3, 4, 5, 6], 4, pad=0)
    assert (ids, seen) == ([3, 4, 5, 6], [1, 1, 1, 1])


def test_training_rows() -> None:
    short = {"input_ids": [7, 8], "labels": [-100, 8], "attention_mask": [1, 1]}
    assert padded_row(short, 4, 0, -100) == {
        "input_ids": [7, 8, 0, 0], "labels": [-100, 8, -100, -100], "attention_mask": [1, 1, 0, 0],
    }  # fmt: skip
    long = {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "attention_mask": [1, 1, 1]}
    assert padded_row(long, 2, 0, -100) == {"input_ids": [2, 3], "labels": [2, 3], "attention_mask": [1, 1]}


def test_a_bucket_that_the_context_cannot_hold() -> None:
    check_fits(64, 64, "")
    with pytest.raises(ConfigurationError, match=r"pads to 65 tokens, .* takes 64 at most.*pad_rows=64"):
        check_fits(65, 64, "")
