"""This module makes the calls of an answer independent of its text, and refuses options that would undo this.

Guarantees: an answer of fixed length takes one pass through the model for the prompt and one pass for each further
token, whatever the tokens are. Generation does not end at a stop token. If a logit is NaN or infinite, the next token
is drawn from replaced logits.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from transformers import LogitsProcessor

from tenant_sdk.model.run_state import RunState
from wire.errors import ConfigurationError

_GUESSING = (
    "prompt_lookup_num_tokens", "assistant_model", "assistant_early_exit", "use_mtp", "is_assistant", "penalty_alpha",
    "dola_layers", "token_healing",
)  # fmt: skip
"""Options of transformers 5.23 that make the number of rows in a step, or the length of the prompt, depend on the text:
speculative decoding, several candidates for one token, and token healing."""
_OF_GUESSING = (
    "assistant_tokenizer", "speculation_type", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind",
    "assistant_ensemble_weight",
)  # fmt: skip
"""Settings that belong to the options in `_GUESSING`. They are refused only if the user passes them, since every
GenerationConfig has default values for them."""
_ENDS_EARLY: dict[str, Any] = dict.fromkeys(
    (
        "max_time", "stop_strings", "stopping_criteria", "early_stopping", "min_length", "min_new_tokens",
        "exponential_decay_length_penalty", "num_beam_groups", "constraints", "force_words_ids",
    )
)  # fmt: skip
"""Options with which the length of an answer depends on its text or on time; the values turn the options off."""
_LARGEST_LOGIT = 1e18
"""The largest magnitude of a logit in an answer of fixed length. A temperature below one enlarges logits, and this
bound keeps them finite: sampling with infinite logits gives NaN."""


_SPECULATING = frozenset({*_GUESSING, *_OF_GUESSING} - {"penalty_alpha", "dola_layers", "token_healing"})
"""Options of speculative decoding, for which an engine has the same number of rows in every step."""


def refuse_guessing(options: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for options that make row counts, which the provider sees, depend on the text."""
    own = options.get("generation_config")
    for name in (*_GUESSING, *_OF_GUESSING):
        inherited = getattr(own, name, None) if name in _GUESSING else None
        if options.get(name, inherited) not in (None, False):
            instead = ": an Engine with speculation= keeps it the same" if name in _SPECULATING else ""
            raise ConfigurationError(
                f"generate does not take {name}: the number of rows in a request would depend on the text, and the "
                f"provider sees it{instead}"
            )


def refuse_early_ends(options: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for options that cannot be combined with `fixed_length`."""
    for name in ("generation_config", *_ENDS_EARLY):
        if options.get(name) not in (None, False):
            raise ConfigurationError(f"fixed_length does not go with {name}: every answer takes the same calls")
    if (options.get("num_beams") or 1) > 1:
        raise ConfigurationError("fixed_length needs num_beams=1: the end of a beam search depends on the text")
    if options.get("cache_implementation") == "paged":
        raise ConfigurationError("fixed_length does not go with cache_implementation='paged': name another cache")


def no_guessing() -> dict[str, Any]:
    """Returns arguments of transformers' `generate` that turn off the options in `_GUESSING`, which the model's
    generation settings may turn on."""
    return dict.fromkeys(_GUESSING)


def fixed_settings() -> dict[str, Any]:
    """Returns arguments of transformers' `generate` with which an answer ends only at its length limit."""
    return {**_ENDS_EARLY, "eos_token_id": None, "num_beams": 1}


def cut_at_stop(token_ids: list[int], stop_ids: Container[int]) -> list[int]:
    """Returns the tokens of an answer up to and including the first stop token, or all tokens if none is a stop
    token."""
    for position, token_id in enumerate(token_ids):
        if token_id in stop_ids:
            return token_ids[: position + 1]
    return token_ids


def bounded_logits(logits: torch.Tensor) -> torch.Tensor:
    """Reduces the magnitudes of logits, of any shape, to at most `_LARGEST_LOGIT`, so that dividing them by a usual
    temperature does not make them infinite. Minus infinity, which excludes a token, is kept. NaN is kept too: callers
    replace it before."""
    return torch.where(logits == -torch.inf, logits, logits.clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT))


class FiniteLogits(LogitsProcessor):  # type: ignore[misc]
    """Checks every step's logits and, in an answer of fixed length, replaces logits from which no token can be
    drawn."""

    def __init__(self, run: RunState, bounds: bool) -> None:
        """Makes a check for one answer.

        Args:
            run: the state of the answer, which records whether a value was NaN or infinite.
            bounds: whether large logits are reduced, so that sampling never overflows.
        """
        self._run, self._bounds = run, bounds

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Returns logits, shape (num_sequences, vocab_size). Minus infinity, which excludes a token, is kept.

        In an answer of fixed length all logits are zero after a value was NaN or infinite.

        Raises:
            NotFinite: a logit is NaN or infinite, and the answer may stop at once.
        """
        self._run.check((scores.amax(dim=-1),))  # the maximum of a row with a NaN is NaN
        if not self._bounds:
            return scores
        if self._run.sends_zeros:
            return torch.zeros_like(scores)
        return bounded_logits(scores)
