"""This module restricts an answer to a grammar: JSON that fits a schema, any JSON object, or a call of a tool.

It uses the library llguidance. A hook is a function that changes the logits before a token is chosen.

Guarantees: every token that the hook allows continues a text of the grammar, and the stop tokens are allowed only where
the text is complete. A schema that no grammar can express is refused before the engine gets the request. Not
guaranteed: an answer that reaches its length limit may end in the middle.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.hf import from_tokenizer

from tenant_sdk.endpoint.errors import HttpError, bad_request
from wire.errors import ConfigurationError

_ANY_OBJECT = {"type": "object"}
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000, step_lexer_fuel=100_000, step_max_items=20_000, max_lexer_states=50_000,
    max_grammar_size=100_000, verbose_errors=False,
)  # fmt: skip
"""Half of llguidance's own limits or less: a schema that needs more would slow down all answers that run at the same
time. By llguidance's documentation, these limits are about 10 ms for the start and 7 ms for a token."""


class Grammars:
    """Makes the grammars of requests. The vocabulary is prepared once, at the first use, which takes about a second."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int], most_bytes: int) -> None:
        """Keeps what the grammars of all requests need.

        Args:
            tokenizer: a transformers tokenizer that no other code uses at the same time.
            stop_ids: the tokens at which an answer ends.
            most_bytes: the size of the largest schema that is accepted, in bytes.
        """
        self._tokenizer, self._stop_ids, self._most_bytes = tokenizer, list(stop_ids), most_bytes
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None

    def of_schema(self, schema: Mapping[str, Any] | None, param: str) -> GrammarHook:
        """Returns the hook for JSON that fits a schema; None stands for any JSON object. Callers must not call this in
        the event loop's thread, since it takes milliseconds.

        Raises:
            HttpError: the schema is too large, or no grammar can express it.
            ConfigurationError: the model has no stop token, or its tokenizer does not work with llguidance.
        """
        text = json.dumps(_ANY_OBJECT if schema is None else schema)
        if len(text) > self._most_bytes:
            raise bad_request(f"a schema has at most {self._most_bytes} bytes here", param, "schema_too_large")
        try:
            grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
            matcher = LLMatcher(self._prepared(), grammar, log_level=0, limits=_LIMITS)
            failed = matcher.is_error()
        except ConfigurationError:
            raise
        except BaseException as exc:
            if isinstance(exc, KeyboardInterrupt | SystemExit):
                raise
            failed = True
        if failed:
            raise HttpError(400, "this JSON schema is invalid, or too complex to be held to", "bad_schema", param)
        return GrammarHook(matcher, self._stop_ids)

    def _prepared(self) -> LLTokenizer:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._tokenizer, self._stop_ids)
            return self._vocabulary


class GrammarHook:
    """Allows only tokens that continue a text of the grammar, as a logits processor of one answer.

    After the end of the text every token is allowed. Only an answer of fixed length goes on after the end.
    """

    def __init__(self, matcher: LLMatcher, stop_ids: Sequence[int], raises: bool = True) -> None:
        """Keeps the matcher, llguidance's state of one text, which must be at the beginning of the text.

        Args:
            matcher: the matcher of this answer only.
            stop_ids: the tokens at which an answer ends.
            raises: whether a grammar that reaches llguidance's limits ends the answer immediately. If not, as for an
                answer of fixed length, the answer goes on, and `check` raises the error after its end.
        """
        self._matcher, self._stop_ids, self._raises = matcher, stop_ids, raises
        self._num_seen: int | None = None
        self._is_over = self._has_failed = False

    def copy(self, raises: bool = True) -> GrammarHook:
        """Returns a hook of the same grammar for another answer."""
        return GrammarHook(self._matcher.deep_copy(), self._stop_ids, raises)

    def check(self) -> None:
        """Raises ConfigurationError if the grammar reached llguidance's limits in the middle of the answer."""
        if self._has_failed:
            raise ConfigurationError("the grammar of this request became too complex in the middle of the answer")

    def __call__(self, token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits, with minus infinity for the tokens that the grammar forbids. After the end of the text,
        returns them unchanged.

        Raises:
            ConfigurationError: the grammar reached llguidance's limits, and the hook was made with `raises`.
        """
        fresh = [] if self._num_seen is None else token_ids[0, self._num_seen :].tolist()
        self._num_seen = token_ids.shape[1]
        if self._is_over:
            return logits
        allowed = self._allowed(fresh, logits.shape[1])
        if allowed is None:
            if self._raises:
                self.check()
            return logits
        return logits.masked_fill(~torch.from_numpy(allowed).to(logits.device), -torch.inf)

    def _allowed(self, fresh: Sequence[int], vocab_size: int) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        """Returns for each token whether it may come next; None at the end of the text, or after a failure.

        Args:
            fresh: the tokens that were chosen since the last call.
            vocab_size: the number of tokens.
        """
        self._has_failed = not all(self._matcher.consume_token(token) for token in fresh) or self._matcher.is_error()
        self._is_over = self._has_failed or (bool(fresh) and fresh[-1] in self._stop_ids)
        if self._is_over:
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=vocab_size).astype(bool)
        self._has_failed = self._is_over = not allowed.any() or self._matcher.is_error()
        return None if self._is_over else allowed


class _PlainTokens:
    """Gives llguidance the text of each token, for tokenizers whose files llguidance cannot read."""

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = stop_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        special = set(tokenizer.all_special_ids)
        self.special_token_ids = sorted(special)
        self.tokens = [
            str(tokenizer.convert_ids_to_tokens(number) if number in special else tokenizer.decode([number])).encode()
            for number in range(len(tokenizer))
        ]

    def __call__(self, text: str | bytes) -> list[int]:
        shown = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return list(self._tokenizer(shown, add_special_tokens=False)["input_ids"])


def _vocabulary(tokenizer: Any, stop_ids: Sequence[int]) -> LLTokenizer:
    if not stop_ids:
        raise ConfigurationError("this model has no stop token, so that no grammar can end its answers")
    try:
        return from_tokenizer(tokenizer, eos_token=list(stop_ids), slices=LLTokenizer.json_slices())
    except BaseException as exc:
        if isinstance(exc, KeyboardInterrupt | SystemExit):
            raise
    try:
        return LLTokenizer(TokenizerWrapper(_PlainTokens(tokenizer, stop_ids)), eos_token=list(stop_ids))
    except Exception as exc:  # noqa: BLE001 - whatever it raises, this tokenizer has no grammars
        raise ConfigurationError(f"grammars are not possible with this tokenizer ({type(exc).__name__})") from None
