"""A tokenizer that fails on some texts: the failure in one sentence, wherever it comes from.

An unverified provider may choose a vocabulary or a pattern that fails on texts of its choice. The tokenizers library
raises bare exceptions then, and for a panic of its own one that is no `Exception` at all.
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
    """Turns whatever a tokenizer raises into one error; errors of ours and the user's Ctrl-C pass.

    Args:
        what: the text's place, such as a line of a data set; it is shown.
        passing: errors that the caller handles itself.

    Raises:
        TokenizerFailed: something else went wrong inside.
    """
    try:
        yield
    except BaseException as exc:
        if isinstance(exc, (VeilbaseError, KeyboardInterrupt, SystemExit, GeneratorExit, *passing)):
            raise
        raise TokenizerFailed(f"{what}: the tokenizer failed ({type(exc).__name__})") from None


class SafeDecoding:
    """A tokenizer for a streamer: when it fails to decode it gives no more text, and says so at the end.

    A decoder that fails on some texts would else end an answer of fixed length at a place that depends on the text.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Args: tokenizer: a transformers tokenizer."""
        self._tokenizer = tokenizer
        self.failed: TokenizerFailed | None = None

    def decode(self, token_ids: Any, **options: Any) -> str:
        """The text, or nothing from the first failure on."""
        if self.failed is not None:
            return ""
        try:
            with surviving("the answer"):
                return str(self._tokenizer.decode(token_ids, **options))
        except TokenizerFailed as exc:
            self.failed = exc
            return ""

    def check(self) -> None:
        """Raises TokenizerFailed where a text could not be decoded."""
        if self.failed is not None:
            raise self.failed
