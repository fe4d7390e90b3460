"""This module writes the logprobs of an answer in OpenAI's two forms, for chats and for plain completions. They are
exact or rounded, as the privacy rules of `privacy.py` allow."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tenant_sdk.endpoint.hooks import LogprobRecord
from tenant_sdk.endpoint.privacy import Released
from tenant_sdk.serving.answer import Answer

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
    record: LogprobRecord, token_ids: Sequence[int], texts: TokenTexts, released: Released, start: int = 0
) -> dict[str, Any]:  # fmt: skip
    """Returns the field `logprobs` of one choice of a chat response, for the tokens from the index `start` on."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = texts[token_id]
        return {"token": text, "logprob": _shown(logprob, released), "bytes": list(text.encode("utf-8", "replace"))}

    content = [
        {**entry(token_id, logprob), "top_logprobs": [entry(*each) for each in top]}
        for token_id, logprob, top in record.steps(token_ids, start)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    record: LogprobRecord, token_ids: Sequence[int], texts: TokenTexts, released: Released, start: int = 0
) -> dict[str, Any]:  # fmt: skip
    """Returns the field `logprobs` of one choice of a plain completion, for the tokens from the index `start` on. Their
    `text_offset` begins at 0."""
    steps = record.steps(token_ids, start)
    tokens = [texts[token_id] for token_id, _, _ in steps]
    offsets = [0, *itertools.accumulate(map(len, tokens))][: len(tokens)]
    top = [{texts[other]: _shown(value, released) for other, value in each} for _, _, each in steps]
    return {
        "tokens": tokens,
        "token_logprobs": [_shown(logprob, released) for _, logprob, _ in steps],
        "top_logprobs": top,
        "text_offset": offsets,
    }


class StreamedLogprobs:
    """Gives the field `logprobs` of each chunk of one streamed choice. All chunks together have each token once."""

    def __init__(self, write: Callable[[Sequence[int], int], dict[str, Any]]) -> None:
        """Begins at the first token.

        Args:
            write: returns the field for the first tokens of an answer, without those before an index.
        """
        self._write = write
        self._num_tokens = self._num_characters = self._offset = 0

    def of(self, text: str, answer: Answer) -> dict[str, Any] | None:
        """Returns the field for the next chunk, which has the text `text`: the tokens whose text ends in it. None if
        there are none, as where a token's text is cut by the end of the chunk."""
        self._num_characters += len(text)
        return self._until(answer.num_tokens_within(self._num_characters), answer)

    def of_the_rest(self, answer: Answer) -> dict[str, Any] | None:
        """Returns the field for the last chunk of a complete answer: the tokens that are left, such as those of a stop
        string. None if there are none."""
        return self._until(len(answer.token_ids), answer)

    def _until(self, num_tokens: int, answer: Answer) -> dict[str, Any] | None:
        if num_tokens <= self._num_tokens:
            return None
        field = self._write(answer.token_ids[:num_tokens], self._num_tokens)
        self._num_tokens = num_tokens
        if "text_offset" in field:
            field["text_offset"] = [self._offset + each for each in field["text_offset"]]
            self._offset += sum(map(len, field["tokens"]))
        return field


def _shown(logprob: float, released: Released) -> float:
    return max(_LEAST, released.rounded(logprob))
