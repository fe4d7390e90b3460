"""Answers whose calls do not depend on their contents, and options of transformers' `generate` that would undo that.

Guarantees: an answer of fixed length takes one call for the prompt and one for each further token, whatever the tokens
are: it does not end at a stop token, and where a logit is NaN or infinite the next token is drawn as usual.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from transformers import LogitsProcessor

from tenant_sdk.model.planned_calls import Course
from wire.errors import ConfigurationError

_GUESSING = (
    "prompt_lookup_num_tokens", "assistant_model", "assistant_early_exit", "use_mtp", "is_assistant", "penalty_alpha",
    "dola_layers", "token_healing",
)  # fmt: skip
"""Options of transformers 5.23 with which the number of rows in a step, or a cut of the prompt, depends on the text:
speculative decoding, candidates for one token, and token healing."""
_OF_GUESSING = (
    "assistant_tokenizer", "speculation_type", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind",
    "assistant_ensemble_weight",
)  # fmt: skip
"""Settings of those options; every GenerationConfig has defaults of them."""
_ENDS_EARLY: dict[str, Any] = dict.fromkeys(
    (
        "max_time", "stop_strings", "stopping_criteria", "early_stopping", "min_length", "min_new_tokens",
        "exponential_decay_length_penalty", "num_beam_groups", "constraints", "force_words_ids",
    )
)  # fmt: skip
"""Options that let an answer end before its length limit, or move its end."""
_LARGEST_LOGIT = 1e18
"""The magnitude to which logits are cut: a temperature below one makes them larger, and a sum of infinities is NaN."""


def refuse_guessing(options: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for options under which row counts would show the text."""
    own = options.get("generation_config")
    for name in (*_GUESSING, *_OF_GUESSING):
        inherited = getattr(own, name, None) if name in _GUESSING else None
        if options.get(name, inherited) not in (None, False):
            raise ConfigurationError(
                f"generate does not take {name}: the number of rows in a request would depend on the text, and the "
                "provider sees it"
            )


def refuse_early_ends(options: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for options that do not go with `fixed_length`."""
    for name in ("generation_config", *_ENDS_EARLY):
        if options.get(name) not in (None, False):
            raise ConfigurationError(f"fixed_length does not go with {name}: every answer takes the same calls")
    if (options.get("num_beams") or 1) > 1:
        raise ConfigurationError("fixed_length needs num_beams=1: the end of a beam search depends on the text")
    if options.get("cache_implementation") == "paged":
        raise ConfigurationError("fixed_length does not go with cache_implementation='paged': name another cache")


def no_guessing() -> dict[str, Any]:
    """Returns arguments of transformers' `generate` that turn off what the provider's generation config may ask for."""
    return dict.fromkeys(_GUESSING)


def fixed_settings() -> dict[str, Any]:
    """Returns arguments of transformers' `generate` with which only the length limit ends an answer."""
    return {**_ENDS_EARLY, "eos_token_id": None, "num_beams": 1}


def cut_at_stop(token_ids: list[int], stop_ids: Container[int]) -> list[int]:
    """Cuts an answer after its first stop token, so that it equals an answer that ended there."""
    for position, token_id in enumerate(token_ids):
        if token_id in stop_ids:
            return token_ids[: position + 1]
    return token_ids


class FiniteLogits(LogitsProcessor):  # type: ignore[misc]
    """Checks every step's logits, and in an answer of fixed length replaces those from which no token can be drawn."""

    def __init__(self, course: Course, bounds: bool) -> None:
        """Args: course: the course of the answer; bounds: whether large numbers are cut, so that sampling never
        overflows."""
        self._course, self._bounds = course, bounds

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Returns logits, shape (num_sequences, vocab_size). Minus infinity means that a token is not allowed, and
        stays."""
        self._course.check((scores.amax(dim=-1),))  # a NaN in a row becomes its maximum
        if not self._bounds:
            return scores
        if self._course.sends_zeros:
            return torch.zeros_like(scores)
        bounded = scores.clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT)
        return torch.where(scores == -torch.inf, scores, bounded)
