"""This module writes the logprobs of an answer in OpenAI's two forms, for chats and for plain completions. They are
exact or rounded, as the privacy rules of `privacy.py` allow.

Guarantees: `bytes` are a token's own bytes, also if the token is a part of a character: those of an answer's tokens
together are those of its text. Such a token is shown as OpenAI shows it: by its bytes, as `\\xf0`, and in plain
completions with `bytes:` before them. Different tokens thus have different keys in `top_logprobs`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tenant_sdk.endpoint.options import LogprobRecord
from tenant_sdk.endpoint.privacy import Released
from tenant_sdk.serving.requests import Answer

_LEAST = -9999.0
"""The logprob that stands for minus infinity, which JSON cannot express; OpenAI uses the same number."""


_UNFINISHED = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""A token of one byte in vocabularies of SentencePiece (`byte_fallback`)."""


def _byte_letters() -> dict[str, int]:
    """Returns the bytes by the letters that stand for them in vocabularies of byte-level BPE. Source: GPT-2's
    `bytes_to_unicode`: a printable byte of Latin-1 is itself, the others are the letters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_LETTER = _byte_letters()


class TokenTexts:
    """Gives the bytes of single tokens. Each is computed once."""

    def __init__(self, tokenizer: Any) -> None:
        """Keeps a transformers tokenizer, which no other code may use at the same time."""
        self._tokenizer, self._lock = tokenizer, threading.Lock()
        self._known: dict[int, bytes] = {}
        self._literal = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
        ids = tokenizer("a", add_special_tokens=False)["input_ids"]
        self._before = list(ids[-1:])
        """A token of a letter. Behind it a token has the space with which it begins, which decoders leave out at the
        beginning of a text."""
        self._letter = str(tokenizer.decode(self._before)) if self._before else ""

    def __getitem__(self, token_id: int) -> bytes:
        """Returns the bytes of a token in UTF-8, special tokens included."""
        with self._lock:
            if token_id not in self._known:
                self._known[token_id] = self._bytes_of(token_id)
            return self._known[token_id]

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._literal:
            return self._literal[token_id].encode("utf-8", "replace")
        text = str(self._tokenizer.decode([*self._before, token_id]))
        if text.startswith(self._letter):
            text = text.removeprefix(self._letter)
        else:
            text = str(self._tokenizer.decode([token_id]))
        if _UNFINISHED not in text:
            return text.encode("utf-8", "replace")
        piece = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if (byte := _BYTE_PIECE.fullmatch(piece)) is not None:
            return bytes([int(byte[1], 16)])
        if all(letter in _BYTE_OF_LETTER for letter in piece):
            return bytes(_BYTE_OF_LETTER[letter] for letter in piece)
        return text.encode("utf-8", "replace")


def _is_whole(token: bytes) -> bool:
    """Returns whether a token's bytes are whole characters."""
    try:
        token.decode()
    except UnicodeDecodeError:
        return False
    return True


def _name(token: bytes) -> str:
    """Returns how a token is shown: its text, with `\\xf0` for the byte f0 of an incomplete character."""
    return token.decode("utf-8", "backslashreplace")


def _key(token: bytes) -> str:
    """Returns how a token is shown in plain completions."""
    return _name(token) if _is_whole(token) else "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


class TextOffsets:
    """Counts the characters of one answer's text. Each token is counted once, however many chunks the answer has."""

    def __init__(self, texts: TokenTexts) -> None:
        """Begins before the first token."""
        self._texts, self._counts = texts, [0]

    def of(self, token_ids: Sequence[int], start: int) -> list[int]:
        """Returns, for each token from the index `start` on, how many characters of the text are before the character
        in which the token begins.

        Args:
            token_ids: the first tokens of the answer; those of an earlier call again, and perhaps further ones.
            start: the index of the first token that is returned.
        """
        for token_id in token_ids[len(self._counts) - 1 :]:
            num_begun = sum(byte & 0xC0 != 0x80 for byte in self._texts[token_id])  # further bytes are 10xxxxxx
            self._counts.append(self._counts[-1] + num_begun)
        tokens = [self._texts[token_id] for token_id in token_ids[start:]]
        return [
            max(0, count - 1) if token and token[0] & 0xC0 == 0x80 else count
            for count, token in zip(self._counts[start:], tokens, strict=False)
        ]


def chat_logprobs(
    record: LogprobRecord, token_ids: Sequence[int], texts: TokenTexts, released: Released, start: int = 0
) -> dict[str, Any]:  # fmt: skip
    """Returns the field `logprobs` of one choice of a chat response, for the tokens from the index `start` on."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        token = texts[token_id]
        return {"token": _name(token), "logprob": _shown(logprob, released), "bytes": list(token)}

    content = [
        {**entry(token_id, logprob), "top_logprobs": [entry(*each) for each in top]}
        for token_id, logprob, top in record.steps(token_ids, start)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    record: LogprobRecord, token_ids: Sequence[int], texts: TokenTexts, released: Released, start: int = 0,
    offsets: TextOffsets | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Returns the field `logprobs` of one choice of a plain completion, for the tokens from the index `start` on.
    `offsets` are those of the choice if it has several chunks."""
    steps = record.steps(token_ids, start)
    tokens = [texts[token_id] for token_id, _, _ in steps]
    # Two tokens of one text, if a vocabulary has them, share a key: the likelier one keeps it, which comes last here.
    top = [{_key(texts[other]): _shown(value, released) for other, value in reversed(each)} for _, _, each in steps]
    return {
        "tokens": [_key(token) for token in tokens],
        "token_logprobs": [_shown(logprob, released) for _, logprob, _ in steps],
        "top_logprobs": [dict(reversed(each.items())) for each in top],
        "text_offset": (offsets or TextOffsets(texts)).of(token_ids, start),
    }


class StreamedLogprobs:
    """Gives the field `logprobs` of each chunk of one streamed choice. All chunks together have each token once."""

    def __init__(self, write: Callable[[Sequence[int], int], dict[str, Any]]) -> None:
        """Begins at the first token.

        Args:
            write: returns the field for the first tokens of an answer, without those before an index.
        """
        self._write = write
        self._num_tokens = self._num_characters = 0

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
        return field


def _shown(logprob: float, released: Released) -> float:
    return max(_LEAST, released.rounded(logprob))
