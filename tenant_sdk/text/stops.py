"""This module finds the stop tokens, which end an answer, if no trusted generation settings name them, and the special
tokens, which have no text in an answer but may be named as a stop string.

Guarantees: the stop tokens are the tokenizer's end-of-sequence token and the special token that the chat template puts
after an assistant's turn. A provider's generation settings are never read.
"""

from __future__ import annotations

from typing import Any

_PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "VeilbaseProbeEnd"}]


def stop_ids_of(tokenizer: Any) -> tuple[int, ...]:
    """Returns the ids of the stop tokens in ascending order; an empty tuple if the tokenizer and its template name no
    stop token.

    Args:
        tokenizer: a transformers tokenizer, with or without a chat template.
    """
    found = {tokenizer.eos_token_id, _turn_end(tokenizer)}
    return tuple(sorted(token for token in found if isinstance(token, int)))


def special_texts(tokenizer: Any) -> dict[int, str]:
    """Returns the texts of the special tokens by id; an answer is decoded without them.

    Args:
        tokenizer: a transformers tokenizer.
    """
    added = tokenizer.added_tokens_decoder.items()
    found = {int(number): str(token) for number, token in added if token.special and str(token)}
    pairs = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return found | {int(number): str(token) for number, token in pairs if str(token)}


def _turn_end(tokenizer: Any) -> int | None:
    """Returns the id of the special token with which the template ends an assistant's turn; None if there is none."""
    if not tokenizer.chat_template:
        return None
    try:
        text = str(tokenizer.apply_chat_template(_PROBE, tokenize=False))
    except Exception:  # noqa: BLE001 - a template may raise anything: then it names no stop token
        return None
    rest = text.rpartition(_PROBE[1]["content"])[2].lstrip()
    ends = [(len(text), number) for number, text in special_texts(tokenizer).items() if rest.startswith(text)]
    return max(ends)[1] if ends else None
