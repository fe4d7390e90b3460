"""A tokenizer that fails on some texts: its failure is told in one sentence, whatever raised it.

An unverified provider may choose a vocabulary or a pattern that fails on texts of its choice. The tokenizers library
then raises bare exceptions, and for a panic of its own an exception that is not even an `Exception`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from wire.errors import ConfigurationError, VeilbaseError


class TokenizerFailed(ConfigurationError):
    """The tokenizer failed on a text, without saying what the text was."""


@contextlib.contextmanager
def surviving(what: str, *passing: type[BaseException]) -> Iterator[None]:
    """Turns whatever a tokenizer raises into one error; errors of this project and the user's Ctrl-C pass.

    Args:
        what: names the text by its place, such as a line of a data set; the error shows it.
        passing: errors that pass because the caller handles them itself.

    Raises:
        TokenizerFailed: the tokenizer raised anything else.
    """
    try:
        yield
    except BaseException as exc:
        if isinstance(exc, (VeilbaseError, KeyboardInterrupt, SystemExit, GeneratorExit, *passing)):
            raise
        raise TokenizerFailed(f"{what}: the tokenizer failed ({type(exc).__name__})") from None


class SafeDecoding:
    """A tokenizer for a streamer: after a failure to decode it gives no more text, and `check` reports the failure.

    A decoder that fails on some texts would otherwise end an answer of fixed length at a place that depends on the
    text.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Args: tokenizer: a transformers tokenizer."""
        self._tokenizer = tokenizer
        self.failed: TokenizerFailed | None = None

    def decode(self, token_ids: Any, **options: Any) -> str:
        """Returns the text; from the first failure on, an empty string."""
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
