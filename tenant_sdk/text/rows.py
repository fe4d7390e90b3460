"""Row counts that do not depend on a text: prompts and training rows are padded to one stated number of tokens.

That number is called the bucket. Guarantees: with a bucket, every prompt and every training row takes exactly that many
rows, whatever it says and whichever tokenizer made it. A text with more tokens is cut at its beginning and a warning on
the tenant's side says so: to refuse it would be visible, and a provider's tokenizer could decide which texts are
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tenant_sdk.warn import warn_and_go_on
from wire.errors import ConfigurationError

DEFAULT_BUCKET_TOKENS = 512
"""The bucket in tokens that `pad_rows=True` stands for."""
_MAX_BUCKET_TOKENS = 1 << 20


class CutWarning(UserWarning):
    """A text had more tokens than the bucket and was cut at its beginning."""


def bucket_tokens(pad_rows: bool | int) -> int | None:
    """Returns the bucket in tokens that `pad_rows` stands for; None where rows are not padded.

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
    """Refuses a bucket that the model's context cannot hold; the decision depends on no text.

    Raises:
        ConfigurationError: the bucket is too large; the text names the largest one that would fit.
    """
    if bucket > room:
        raise ConfigurationError(
            f"pad_rows pads to {bucket} tokens, the model's context has room for {max(room, 0)}{beside}: state a "
            "smaller bucket, such as pad_rows=64"
        )


def padded_prompt(ids: Sequence[int], bucket: int, pad: int) -> tuple[list[int], list[int]]:
    """Returns a prompt of exactly `bucket` tokens, padded on the left, and its attention mask.

    Args:
        ids: the prompt's tokens, in any number; of a longer prompt the last ones are kept, with a warning.
        bucket: the number of rows.
        pad: the token to pad with.
    """
    if len(ids) > bucket:
        said = f"the prompt has {len(ids)} tokens, pad_rows keeps the last {bucket}: the answer does not know the rest"
        warn_and_go_on(said, CutWarning)
    kept = list(ids[-bucket:]) or [pad]  # a prompt without tokens gets one: attention needs a token to look at
    padding = bucket - len(kept)
    return [pad] * padding + kept, [0] * padding + [1] * len(kept)


def padded_row(row: dict[str, list[int]], bucket: int, pad: int, ignore_index: int) -> dict[str, list[int]]:
    """Returns a training row of exactly `bucket` tokens, padded on the right; of a longer row the last tokens are
    kept."""
    kept = {key: values[-bucket:] for key, values in row.items()}
    padding = bucket - len(kept["input_ids"])
    fill = {"input_ids": pad, "labels": ignore_index, "attention_mask": 0}
    return {key: [*values, *[fill[key]] * padding] for key, values in kept.items()}


def pad_token(tokenizer: Any) -> int:
    """Returns the token to pad with; attention never looks at it."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return int(pad) if pad is not None else 0
