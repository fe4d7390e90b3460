"""This module finds the stop tokens, which end an answer, if no trusted generation settings name them.

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


def _turn_end(tokenizer: Any) -> int | None:
    """Returns the id of the special token with which the template ends an assistant's turn; None if there is none."""
    if not tokenizer.chat_template:
        return None
    try:
        text = str(tokenizer.apply_chat_template(_PROBE, tokenize=False))
    except Exception:  # noqa: BLE001 - a template may raise anything: then it names no stop token
        return None
    rest = text.rpartition(_PROBE[1]["content"])[2].lstrip()
    special = [
        (str(token), number) for number, token in tokenizer.added_tokens_decoder.items() if token.special and str(token)
    ]
    ends = [(len(token), number) for token, number in special if rest.startswith(token)]
    return max(ends)[1] if ends else None
