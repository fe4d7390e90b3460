"""This module pads prompts and training rows to one number of tokens, the bucket. Row counts then depend on no text.

Guarantees: with a bucket, every prompt and every training row takes exactly as many rows as the bucket says, whatever
the text and the tokenizer are. A longer prompt loses its first tokens, with a warning to the tenant; so does a longer
training row if the tokenizer is an unverified provider's. Such a text is not refused: the provider would see the
refusal, and its tokenizer could decide which texts are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tenant_sdk.warn import warn_and_go_on
from wire.errors import ConfigurationError

DEFAULT_BUCKET_TOKENS = 512
"""The bucket, in tokens, for `pad_rows=True`."""
_MAX_BUCKET_TOKENS = 1 << 20


class CutWarning(UserWarning):
    """Warns that a text had more tokens than the bucket and lost its first tokens, or that a prompt could not be used
    at all."""


def bucket_tokens(pad_rows: bool | int) -> int | None:
    """Returns the bucket, in tokens, for a value of `pad_rows`; None if rows are not padded.

    Raises:
        ConfigurationError: `pad_rows` is not True, False or an allowed number of tokens.
    """
    if pad_rows is False or pad_rows is None:
        return None
    if pad_rows is True:
        return DEFAULT_BUCKET_TOKENS
    if not isinstance(pad_rows, int) or not 2 <= pad_rows <= _MAX_BUCKET_TOKENS:
        raise ConfigurationError(
            f"pad_rows (--pad-rows) is True, False or a number of tokens from 2 to {_MAX_BUCKET_TOKENS}, got "
            f"{ascii(pad_rows)[:40]}"
        )
    return pad_rows


def check_fits(bucket: int, room: int, beside: str) -> None:
    """Refuses a bucket that the model's context cannot hold; no text influences the decision.

    Args:
        bucket: the bucket, in tokens.
        room: the number of tokens for which the context has room.
        beside: the end of a sentence for the error text, such as " beside an answer".

    Raises:
        ConfigurationError: the bucket is too large; the text names the largest one that would fit.
    """
    if bucket > room:
        raise ConfigurationError(
            f"pad_rows pads to {bucket} tokens, and the model takes {max(room, 0)} at most{beside}: name a "
            "smaller number, such as pad_rows=64"
        )


def padded_prompt(ids: Sequence[int], bucket: int, pad: int) -> tuple[list[int], list[int]]:
    """Returns a prompt of exactly `bucket` tokens, padded on the left, and its attention mask.

    Args:
        ids: the prompt's token ids; if there are more than `bucket`, the last ones are kept and a warning is issued.
        bucket: the bucket, in tokens.
        pad: the id of the padding token.
    """
    if len(ids) > bucket:
        said = f"the prompt has {len(ids)} tokens, pad_rows keeps the last {bucket}: the answer does not know the rest"
        warn_and_go_on(said, CutWarning)
    kept = list(ids[-bucket:]) or [pad]  # attention needs at least one token that is not masked out
    padding = bucket - len(kept)
    return [pad] * padding + kept, [0] * padding + [1] * len(kept)


def padded_row(row: dict[str, list[int]], bucket: int, pad: int, ignore_index: int) -> dict[str, list[int]]:
    """Returns a training row of exactly `bucket` tokens. A shorter row is padded on the right, and a longer one is cut
    to its last tokens."""
    kept = {key: values[-bucket:] for key, values in row.items()}
    padding = bucket - len(kept["input_ids"])
    fill = {"input_ids": pad, "labels": ignore_index, "attention_mask": 0}
    return {key: [*values, *[fill[key]] * padding] for key, values in kept.items()}


def pad_token(tokenizer: Any) -> int:
    """Returns the id of the token to pad with: the padding token, else the end-of-sequence token, else 0. The attention
    mask excludes padding."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return int(pad) if pad is not None else 0
