"""Draws the next token of one request, with its own settings and its own random numbers.

Guarantees: the numbers are those of transformers' `generate` with the same settings: the same processors in the same
order over the logits in float32, and for a seed the tokens that it draws after `torch.manual_seed(seed)`. Random
numbers come from the request's own generator: what else is answered beside it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from wire.errors import ConfigurationError

LogitsHook = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A logits processor of transformers' kind: is given the token ids so far, shape (1, length), and the logits, shape
(1, vocab_size), and returns the logits, minus infinity where a token is not allowed; a grammar is one."""

_DEFAULT_TOP_K = 50
"""The top_k of transformers 5.23 where neither the user nor the checkpoint names one (`GenerationConfig`)."""


_NOT_APPLIED = (
    "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "bad_words_ids",
    "min_length", "min_new_tokens", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens",
    "begin_suppress_tokens", "exponential_decay_length_penalty", "guidance_scale", "watermarking_config",
    "renormalize_logits", "remove_invalid_values",
)  # fmt: skip
"""Settings of transformers 5.23 (`_get_logits_processor`) that change which token is chosen and that are not here."""
_NEUTRAL = (None, False, 0, 1.0)
"""Values of those settings that change nothing."""


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one answer are chosen.

    Attributes:
        do_sample: whether tokens are drawn; otherwise the likeliest is taken and temperature, top_k, top_p and seed
            change nothing.
        temperature, top_k, top_p, repetition_penalty: as in transformers; None for what the checkpoint's generation
            settings say, and transformers' defaults where they say nothing. top_k=0 and top_p=1 allow all tokens.
        seed: of the request's own random numbers; None for one that nobody knows.
        logits_processor: functions that see and may change the logits, before temperature, top_k and top_p.
    """

    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logits_processor: Sequence[LogitsHook] = field(default=(), repr=False)


class Sampler:
    """Chooses the tokens of one answer."""

    def __init__(self, settings: Sampling, defaults: GenerationConfig, device: torch.device) -> None:
        """Makes a sampler.

        Args:
            settings: those of the request.
            defaults: the model's generation settings.
            device: where logits are.

        Raises:
            ConfigurationError: a setting that cannot be.
        """
        _check(settings)
        self._do_sample = settings.do_sample
        self._device = device
        self._generator: torch.Generator | None = None
        if settings.do_sample:
            self._generator = torch.Generator(device)
            if settings.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(settings.seed)
        try:
            self._processors = LogitsProcessorList(_processors(settings, defaults))
        except (ValueError, TypeError):  # transformers' own text names the setting, but not in one plain line
            raise ConfigurationError(
                "temperature and repetition_penalty are above 0, top_k is a whole number from 0 and top_p from 0 to 1: "
                f"got {settings!r}"[:300]
            ) from None

    def next_token(self, token_ids: Sequence[int], logits: torch.Tensor) -> int:
        """Returns the next token.

        Args:
            token_ids: prompt and answer so far.
            logits: float32, shape (vocab_size,); all finite, or minus infinity.
        """
        scores = logits[None]
        if self._processors:
            scores = self._processors(torch.tensor([token_ids], device=self._device), scores.clone())
        if self._generator is None:
            return int(scores.argmax(dim=-1))
        return int(torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=self._generator))


def check_defaults(defaults: GenerationConfig) -> None:
    """Refuses a checkpoint whose generation settings would make `generate` choose other tokens than a `Sampler` does.

    Raises:
        ConfigurationError: names the setting.
    """
    for name in _NOT_APPLIED:
        if getattr(defaults, name, None) not in _NEUTRAL:
            raise ConfigurationError(
                f"the checkpoint's generation settings have {name}, which the engine does not apply"
            )


def _processors(settings: Sampling, defaults: GenerationConfig) -> list[Any]:
    """Returns the processors in the order in which transformers applies them."""

    def setting(name: str, neutral: Any) -> Any:
        chosen = getattr(settings, name)
        inherited = getattr(defaults, name, None) if chosen is None else chosen
        return neutral if inherited is None else inherited

    made: list[Any] = []
    if (penalty := setting("repetition_penalty", 1.0)) != 1.0:
        made.append(RepetitionPenaltyLogitsProcessor(penalty))
    made.extend(settings.logits_processor)
    if not settings.do_sample:
        return made
    if (temperature := setting("temperature", 1.0)) != 1.0:
        made.append(TemperatureLogitsWarper(temperature))
    if (top_k := setting("top_k", _DEFAULT_TOP_K)) != 0:
        made.append(TopKLogitsWarper(top_k))
    if (top_p := setting("top_p", 1.0)) != 1.0:
        made.append(TopPLogitsWarper(top_p))
    return made


def _check(settings: Sampling) -> None:
    """Refuses settings of a wrong kind, which transformers would only meet in the middle of an answer."""
    if not isinstance(settings.do_sample, bool):
        raise ConfigurationError(f"do_sample is True or False, got {type(settings.do_sample).__name__}")
    seed = settings.seed
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 63):
        raise ConfigurationError(f"seed is a whole number of 64 bits, got {ascii(seed)[:40]}")
    if not all(callable(each) for each in settings.logits_processor):
        raise ConfigurationError("logits_processor is a list of functions of token ids and logits")
