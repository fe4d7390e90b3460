"""This module decodes the tokens of one answer into text, token by token, and finds stop strings.

Guarantees: the pieces together are the text that the tokenizer decodes from all tokens at once, without special tokens,
up to the first stop string, which is left out. This holds for tokenizers with which further tokens do not change
complete earlier characters. A piece never ends inside a character of several tokens, up to 16; such a character decodes
to U+FFFD until it is complete. A piece never ends with the beginning of a stop string that may still be completed: such
text is held back. A stop string may be, begin with, hold or end with special tokens: it is looked for in the text with
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tenant_sdk.text.failures import SafeDecoding

_UNFINISHED = "�"
_MOST_WAITING = 16
"""The most tokens that are held back for an incomplete character. A character has up to 4 bytes, and a token has at
least one byte."""


_NONE: Mapping[int, str] = MappingProxyType({})


class TextStream:
    """Decodes the text of one answer."""

    def __init__(self, decoding: SafeDecoding, stops: Sequence[str] = (), special: Mapping[int, str] = _NONE) -> None:
        """Makes a stream without text.

        Args:
            decoding: the tokenizer; after a failure, the tokenizer gives no more text.
            stops: strings at which the answer ends.
            special: the texts of the special tokens by id. They are no text of the answer, but stop strings see them.
        """
        self._decoding, self._stops = decoding, tuple(stops)
        self._special = special if self._stops else _NONE
        self._marks: list[tuple[int, str]] = []
        """The special tokens in the text that is held back, in order: the characters of it before each, and its text or
        the end of it."""
        self._token_ids: list[int] = []
        # The tokens before `_read` are in the text. New tokens are decoded together with the tokens from `_begin` on.
        self._begin = self._read = 0
        self._held = ""
        self.is_stopped = False
        self.text = ""
        """The text that was handed out so far."""
        self.token_ends: list[int] = []
        """For each token whose text is known, the number of characters of the text up to its end, as if there were no
        stop strings. Tokens that make a character together have the same number. So have tokens without text and the
        next one with text; at the end of an answer they have none."""

    def put(self, token_id: int) -> str:
        """Adds a token and returns the text that is now complete; returns an empty string after a stop string."""
        if self.is_stopped:
            return ""
        self._token_ids.append(token_id)
        if token_id in self._special:
            self._marks.append((len(self._held), self._special[token_id]))
            return self._hand_out("", is_end=False)
        before = self._decode(self._begin, self._read)
        now = self._decode(self._begin, len(self._token_ids))
        is_waiting = now.endswith(_UNFINISHED) and len(self._token_ids) - self._read < _MOST_WAITING
        if is_waiting or not now.startswith(before) or len(now) == len(before):
            return ""
        self._begin, self._read = self._read, len(self._token_ids)
        return self._hand_out(now[len(before) :], is_end=False)

    def end(self) -> str:
        """Returns the rest of the text, which was held back for a character or a stop string that was never completed;
        returns an empty string after a stop string."""
        if self.is_stopped:
            return ""
        whole = self._decode(0, len(self._token_ids))
        given = self.text + self._held
        rest = whole[len(given) :] if whole.startswith(given) else self._left_over()
        return self._hand_out(rest, is_end=True)

    def _left_over(self) -> str:
        before, now = self._decode(self._begin, self._read), self._decode(self._begin, len(self._token_ids))
        return now[len(before) :]

    def _decode(self, start: int, stop: int) -> str:
        if start == stop:
            return ""
        return self._decoding.decode(self._token_ids[start:stop], skip_special_tokens=True)

    def _hand_out(self, more: str, is_end: bool) -> str:
        ready = self._held + more
        if more:
            self.token_ends += [len(self.text) + len(ready)] * (len(self._token_ids) - len(self.token_ends))
        marked = self._marked(ready)
        found = [place for place in map(marked.find, self._stops) if place >= 0]
        if found:
            ready, self._held, self.is_stopped = ready[: self._pass(min(found))], "", True
        else:
            num_held = 0 if is_end else max((_overlap(marked, stop) for stop in self._stops), default=0)
            num_ready = self._pass(len(marked) - num_held)
            ready, self._held = ready[:num_ready], ready[num_ready:]
        self.text += ready
        return ready

    def _marked(self, text: str) -> str:
        """Returns the text that is held back with its special tokens, as stop strings see it."""
        places = [0, *(place for place, _ in self._marks), len(text)]
        parts = [text[begin:end] for begin, end in itertools.pairwise(places)]
        return "".join(part + mark for part, (_, mark) in zip(parts, [*self._marks, (0, "")], strict=True))

    def _pass(self, size: int) -> int:
        """Takes the first `size` characters off the marked text. Returns how many of them are no special tokens."""
        num_before = num_marked = 0
        left: list[tuple[int, str]] = []
        for place, mark in self._marks:
            begin = place + num_marked  # in the marked text
            num_marked += len(mark)
            passed = min(max(size - begin, 0), len(mark))
            num_before += passed
            if passed < len(mark):
                left.append((place, mark[passed:]))
        num_text = size - num_before
        self._marks = [(max(0, place - num_text), mark) for place, mark in left]
        return num_text


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of the text that is a prefix of the stop string and shorter than it."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
