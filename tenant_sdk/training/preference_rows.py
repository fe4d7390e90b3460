"""This module turns preferences (a prompt with a chosen and a rejected answer) into token rows for TRL's DPOTrainer.

Guarantees: the tokens are those that TRL makes of the same row; they are made here, so that an unverified provider's
chat template never sees a text, and so that errors name the row and show nothing of it. With a bucket no number of
tokens depends on a text.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from tenant_sdk.text.rows import check_fits
from tenant_sdk.text.source import TenantText
from tenant_sdk.training.dataset import Preference, Row
from tenant_sdk.training.labelled_tokens import IGNORE_INDEX, tokenize
from tenant_sdk.training.token_rows import TokenRow, may_be_unusable
from tenant_sdk.training.truncation import REFUSE, fitted, tokenizer_limit

PreferenceRow = dict[str, list[int]]
"""The tokens `prompt_ids`, `chosen_ids` and `rejected_ids` of one preference, as TRL's collator takes them."""


def preference_rows(
    parsed: list[Row],
    text: TenantText,
    max_length: int,
    bucket: int | None,
    num_virtual: int,
    truncation: str = REFUSE,
) -> list[PreferenceRow]:
    """Returns the tokens of a data set of preferences.

    Args:
        parsed: the result of `load_rows`, with rows whose form is `Preference`.
        text, max_length, bucket, num_virtual, truncation: see `tenant_sdk.training.token_rows.training_rows`. The
            limits count the prompt and one answer; a row is too long if it is so with either answer.

    Raises:
        DatasetError: a row is too long or cannot be used; with a bucket and an unverified provider's tokenizer such a
            row is cut, or gets no answers and teaches nothing.
        ConfigurationError: the bucket is longer than `max_length`.
        TemplateDoesNotFit: see `tenant_sdk.training.token_rows.may_be_unusable`; only with a bucket.
    """
    never_refuse = False
    if bucket is not None:
        check_fits(bucket, max_length, "")
        max_length, never_refuse = bucket, may_be_unusable(text)
    limit = tokenizer_limit(truncation, max_length)
    sides = [
        tokenize(
            [replace(row, form=getattr(row.form, side)) for row in parsed if isinstance(row.form, Preference)],
            text.tokenizer, limit, num_virtual_tokens=num_virtual, never_refuse=never_refuse,
        )
        for side in ("chosen", "rejected")
    ]  # fmt: skip
    rows = [_pair(chosen, rejected) for chosen, rejected in zip(*sides, strict=True)]
    if never_refuse and truncation == REFUSE:
        return [_last_tokens(row, max_length) for row in rows]
    return fitted(rows, max_length, truncation, longest_side, _first_tokens)


def longest_side(row: PreferenceRow) -> int:
    """Returns the number of tokens of a row's prompt with the longer answer."""
    return len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"]))


def _pair(chosen: TokenRow, rejected: TokenRow) -> PreferenceRow:
    """Returns a preference from its prompt with either answer. The prompt ends where the first answer begins, or
    earlier, where the two differ: a token may span the prompt's end."""
    starts = [_first_label(chosen), _first_label(rejected)]
    if None in starts:  # a row that could not be used
        return {"prompt_ids": [0], "chosen_ids": [], "rejected_ids": []}
    together = zip(chosen["input_ids"], rejected["input_ids"], strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], together))
    end = min(shared, *(start for start in starts if start is not None))
    return {
        "prompt_ids": chosen["input_ids"][:end],
        "chosen_ids": chosen["input_ids"][end:],
        "rejected_ids": rejected["input_ids"][end:],
    }


def _first_label(row: TokenRow) -> int | None:
    return next((place for place, label in enumerate(row["labels"]) if label != IGNORE_INDEX), None)


def _first_tokens(row: PreferenceRow, max_length: int) -> PreferenceRow:
    room = max(max_length - len(row["prompt_ids"]), 0)
    answers = {key: row[key][:room] for key in ("chosen_ids", "rejected_ids")}
    return {"prompt_ids": row["prompt_ids"][:max_length], **answers}


def _last_tokens(row: PreferenceRow, max_length: int) -> PreferenceRow:
    """Returns a row whose prompt and answers have lost their first tokens if they were too long."""
    room = max(max_length - max(len(row["chosen_ids"]), len(row["rejected_ids"])), 0)
    prompt = row["prompt_ids"]
    answers = {key: row[key][-max_length:] for key in ("chosen_ids", "rejected_ids")}
    return {"prompt_ids": prompt[len(prompt) - room :] if room < len(prompt) else prompt, **answers}
