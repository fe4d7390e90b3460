"""This module writes the logprobs of an answer in OpenAI's two forms, for chats and for plain completions. They are
exact or rounded, as the privacy rules of `privacy.py` allow."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

from tenant_sdk.endpoint.hooks import LogprobRecord
from tenant_sdk.endpoint.privacy import Released

_LEAST = -9999.0
"""The logprob that stands for minus infinity, which JSON cannot express; OpenAI uses the same number."""


class TokenTexts:
    """Gives the text of single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        """Keeps a transformers tokenizer, which no other code may use at the same time."""
        self._tokenizer, self._lock = tokenizer, threading.Lock()

    def __getitem__(self, token_id: int) -> str:
        """Returns the text of a token, special tokens included."""
        with self._lock:
            return str(self._tokenizer.decode([token_id]))


def chat_logprobs(
    record: LogprobRecord, token_ids: Sequence[int], texts: TokenTexts, released: Released
) -> dict[str, Any]:  # fmt: skip
    """Returns the field `logprobs` of one choice of a chat response."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = texts[token_id]
        return {"token": text, "logprob": _shown(logprob, released), "bytes": list(text.encode("utf-8", "replace"))}

    content = [
        {**entry(token_id, logprob), "top_logprobs": [entry(*each) for each in top]}
        for token_id, logprob, top in record.steps(token_ids)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    record: LogprobRecord, token_ids: Sequence[int], texts: TokenTexts, released: Released
) -> dict[str, Any]:  # fmt: skip
    """Returns the field `logprobs` of one choice of a plain completion."""
    steps = record.steps(token_ids)
    tokens = [texts[token_id] for token_id, _, _ in steps]
    offsets = [0, *itertools.accumulate(map(len, tokens))][: len(tokens)]
    top = [{texts[other]: _shown(value, released) for other, value in each} for _, _, each in steps]
    return {
        "tokens": tokens,
        "token_logprobs": [_shown(logprob, released) for _, logprob, _ in steps],
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _shown(logprob: float, released: Released) -> float:
    return max(_LEAST, released.rounded(logprob))
