"""This module defines prompts to which no chat template is applied: a text that is continued as it is, or token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tenant_sdk.plain_values import WrongOption
from tenant_sdk.text.source import surviving


@dataclass(frozen=True)
class ReadyText:
    """Holds a text to which no chat template is applied.

    Attributes:
        text: the text.
        with_special_tokens: whether the tokenizer adds its own tokens, such as one for the beginning. A text that a
            template rendered has them already.
    """

    text: str = field(repr=False)
    with_special_tokens: bool = True


@dataclass(frozen=True)
class ReadyTokens:
    """Holds a prompt's token ids."""

    token_ids: Sequence[int] = field(repr=False)


def ready_ids(tokenizer: Any, prompt: ReadyText | ReadyTokens) -> list[int]:
    """Returns the token ids of a prompt that is already rendered.

    Raises:
        WrongOption: an id is not one of the tokenizer's, so that the model may have no embedding for it.
        TokenizerFailed: the tokenizer fails on this text.
    """
    if isinstance(prompt, ReadyText):
        with surviving("the prompt"):
            return list(tokenizer(prompt.text, add_special_tokens=prompt.with_special_tokens)["input_ids"])
    ids = list(prompt.token_ids)
    if not all(isinstance(each, int) and 0 <= each < len(tokenizer) for each in ids):
        raise WrongOption(f"a prompt of token ids has whole numbers from 0 to {len(tokenizer) - 1}", "prompt")
    return ids
