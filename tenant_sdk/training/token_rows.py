"""This module turns a data set into token rows. Rows keep their own lengths, or all get one length, the bucket.

Guarantees: with a bucket every row has exactly the bucket's length. If the tokenizer is an unverified provider's,
rows that are too long or cannot be used are not refused, because the provider would see the refusal.
"""

from __future__ import annotations

import contextlib

from tenant_sdk.text.rows import CutWarning, check_fits, pad_token, padded_row
from tenant_sdk.text.source import TenantText
from tenant_sdk.training.dataset import Row
from tenant_sdk.training.labelled_tokens import IGNORE_INDEX, RENDER_ERRORS, tokenize
from tenant_sdk.training.truncation import REFUSE, TRUNCATE, fitted, tokenizer_limit
from tenant_sdk.warn import warn_and_go_on

_PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


TokenRow = dict[str, list[int]]
"""A row's `input_ids`, `labels` and `attention_mask`, each of the row's length."""


def training_rows(
    parsed: list[Row],
    text: TenantText,
    max_length: int,
    bucket: int | None,
    num_virtual: int,
    truncation: str = REFUSE,
) -> list[TokenRow]:
    """Returns the tokens of a data set.

    Args:
        parsed: the result of `load_rows`.
        text: the session's tokenizer and its source.
        max_length: the most tokens that a row may have.
        bucket: the number of tokens of every row; None if each row keeps its own length.
        num_virtual: the tokens that a prompt-learning adapter adds; they are already subtracted from `max_length`.
        truncation: what becomes of rows that are too long (tenant_sdk/training/truncation.py).

    Returns:
        One dict per row, as `tenant_sdk.training.labelled_tokens.tokenize` describes.

    Raises:
        DatasetError: a row is too long or cannot be used. With a bucket and an unverified provider's tokenizer, a row
            that is too long is cut instead, and a row that cannot be used gets no labels.
        ConfigurationError: the bucket is longer than `max_length`.
        TemplateDoesNotFit: see `may_be_unusable`; only with a bucket.
    """
    limit = tokenizer_limit(truncation, max_length if bucket is None else bucket)
    if bucket is None:
        rows = tokenize(parsed, text.tokenizer, limit, num_virtual_tokens=num_virtual)
        rows = fitted(rows, max_length, truncation, num_tokens_of, _first_tokens)
        _warn_of_idle_rows(rows, max_length)
        return rows
    check_fits(bucket, max_length, "")
    may_be_spoilt = may_be_unusable(text)
    rows = tokenize(parsed, text.tokenizer, limit, num_virtual_tokens=num_virtual, never_refuse=may_be_spoilt)
    if truncation == TRUNCATE:
        rows = fitted(rows, bucket, truncation, num_tokens_of, _first_tokens)
        _warn_of_idle_rows(rows, bucket)
    num_too_long = sum(len(row["input_ids"]) > bucket for row in rows)
    if num_too_long:
        longest = max(len(row["input_ids"]) for row in rows)
        said = f"{num_too_long} of {len(rows)} rows were cut to their last {bucket} tokens; the longest has {longest}"
        warn_and_go_on(said, CutWarning)
    pad = pad_token(text.tokenizer)
    return [padded_row(row, bucket, pad, IGNORE_INDEX) for row in rows]


def _warn_of_idle_rows(rows: list[TokenRow], max_length: int) -> None:
    """Warns of rows that have no label left; they stay (tenant_sdk/training/truncation.py)."""
    num_idle = sum(set(row["labels"][1:]) <= {IGNORE_INDEX} for row in rows)
    if num_idle:
        said = f"{num_idle} of {len(rows)} rows have nothing to learn in their first {max_length} tokens"
        warn_and_go_on(f"{said}: they are sent all the same, and teach nothing", CutWarning)


def may_be_unusable(text: TenantText) -> bool:
    """Returns whether padded rows must be accepted even if the tokenizer fails on them: it is an unverified provider's.

    Raises:
        TemplateDoesNotFit: the tokenizer's chat template fits no conversation at all.
    """
    may_be_spoilt = text.origin == "provider"
    if may_be_spoilt and text.tokenizer.chat_template:
        with contextlib.suppress(*RENDER_ERRORS):  # of the template; each row then says that it cannot be used
            text.tokenizer.apply_chat_template(_PROBE, tokenize=False)  # raises if the template fits no conversation
    return may_be_spoilt


def num_tokens_of(row: TokenRow) -> int:
    """Returns the number of tokens of a row."""
    return len(row["input_ids"])


def _first_tokens(row: TokenRow, max_length: int) -> TokenRow:
    return {key: values[:max_length] for key, values in row.items()}
