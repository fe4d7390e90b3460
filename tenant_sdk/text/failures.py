"""This module turns a tokenizer's failure on a text into one typed error.

An unverified provider may choose a vocabulary or a pattern that fails on texts of the provider's choice. The tokenizers
library then raises a bare `Exception`, or, after a panic in Rust, an exception that is no subclass of `Exception`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from wire.errors import ConfigurationError, VeilbaseError


class TokenizerFailed(ConfigurationError):
    """Says that the tokenizer failed on a text. The message does not quote the text."""


@contextlib.contextmanager
def surviving(what: str, *passing: type[BaseException]) -> Iterator[None]:
    """Turns errors that a tokenizer raises inside the context into `TokenizerFailed`.

    Errors of this project, Ctrl-C and the end of the program are passed on unchanged.

    Args:
        what: the name of the text for the error message, such as a line of a data set; never the text itself.
        passing: further error classes that are passed on unchanged.

    Raises:
        TokenizerFailed: the tokenizer raised any other error.
    """
    try:
        yield
    except BaseException as exc:
        if isinstance(exc, (VeilbaseError, KeyboardInterrupt, SystemExit, GeneratorExit, *passing)):
            raise
        raise TokenizerFailed(f"{what}: the tokenizer failed ({type(exc).__name__})") from None


class SafeDecoding:
    """Decodes tokens for a streamer; after a failure it returns no more text, and `check` raises the failure's error.

    If decoding raised the error at once, an answer of fixed length would end early, at a token that depends on the
    text.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Wraps a transformers tokenizer, which has not failed yet."""
        self._tokenizer = tokenizer
        self.failed: TokenizerFailed | None = None

    def decode(self, token_ids: Any, **options: Any) -> str:
        """Returns the text of the tokens; from the first failure on, returns an empty string."""
        if self.failed is not None:
            return ""
        try:
            with surviving("the answer"):
                return str(self._tokenizer.decode(token_ids, **options))
        except TokenizerFailed as exc:
            self.failed = exc
            return ""

    def check(self) -> None:
        """Raises TokenizerFailed if a text could not be decoded."""
        if self.failed is not None:
            raise self.failed
