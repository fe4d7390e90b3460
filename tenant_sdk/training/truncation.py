"""This module decides what becomes of rows that have too many tokens: they are refused, cut, or left out.

Guarantees: a warning says how many rows were cut or left out, never which text. A cut row keeps its first tokens, as in
TRL; if none of them is a label, the row stays and teaches nothing, so that the number of rows does not depend on where
labels are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from tenant_sdk.text.rows import CutWarning
from tenant_sdk.warn import warn_and_go_on
from wire.errors import ConfigurationError, DatasetError

REFUSE, TRUNCATE, DROP = MODES = ("refuse", "truncate", "drop")
"""The values of the option `truncation`; `refuse` is the default."""

_Tokens = TypeVar("_Tokens")


def check_truncation(truncation: str, bucket: int | None) -> None:
    """Checks the option `truncation` before anything is sent.

    Args:
        truncation: the option's value.
        bucket: the number of tokens to which rows are padded; None if they are not padded.

    Raises:
        ConfigurationError: the value is none of MODES, or it is `drop` although rows are padded: the number of rows
            would then show how many are long.
    """
    if truncation not in MODES:
        raise ConfigurationError(f"truncation must be {', '.join(MODES)}, got {truncation!r}")
    if truncation == DROP and bucket is not None:
        raise ConfigurationError(
            "truncation='drop' would show how many rows are long, which pad_rows hides: choose truncation='truncate'"
        )


def tokenizer_limit(truncation: str, max_length: int) -> int:
    """Returns the number of tokens above which a row is refused while it is turned into tokens."""
    return max_length if truncation == REFUSE else sys.maxsize


def fitted(
    rows: Sequence[_Tokens],
    max_length: int,
    truncation: str,
    length: Callable[[_Tokens], int],
    cut: Callable[[_Tokens, int], _Tokens],
) -> list[_Tokens]:
    """Returns the rows with at most `max_length` tokens each, and warns if rows were cut or left out.

    Args:
        rows: tokenised rows of any length.
        max_length: the most tokens that a row may have.
        truncation: `truncate` or `drop`; with `refuse`, rows that are too long have been refused before.
        length: returns the number of tokens of a row.
        cut: returns a row's first tokens, as many as its second argument says.

    Raises:
        DatasetError: every row is too long and would be left out.
    """
    num_long = sum(length(row) > max_length for row in rows)
    if not num_long:
        return list(rows)
    if truncation == TRUNCATE:
        longest = max(map(length, rows))
        what = f"were cut to their first {max_length} tokens; the longest has {longest}"
        warn_and_go_on(f"{num_long} of {len(rows)} rows {what}", CutWarning)
        return [cut(row, max_length) if length(row) > max_length else row for row in rows]
    if num_long == len(rows):
        raise DatasetError(f"expected a row of at most {max_length} tokens; truncation='drop' leaves no row")
    warn_and_go_on(f"{num_long} of {len(rows)} rows have more than {max_length} tokens and are left out", CutWarning)
    return [row for row in rows if length(row) <= max_length]
