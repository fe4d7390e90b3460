"""This module chooses the next token of one request, with the request's own settings and random numbers.

Guarantees: the tokens are those of transformers' `generate` with the same settings. The same processors are applied to
the float32 logits in the same order, and with a seed the tokens are those that `generate` draws after
`torch.manual_seed(seed)`. Each request has its own random generator, so that other requests do not change its tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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

from tenant_sdk.plain_values import true_or_false
from wire.errors import ConfigurationError

LogitsHook = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A logits processor as in transformers, such as a grammar. It takes the token ids so far, shape (1, length), and the
logits, shape (1, vocab_size), and returns logits. A token whose logit is minus infinity is not allowed. If it has a
method `chosen`, this gets each token as soon as it is chosen, so that the hook can prepare its next call while the
engine computes the next step."""

_DEFAULT_TOP_K = 50
"""The top_k of transformers 5.23 if neither the user nor the checkpoint sets one (`GenerationConfig`)."""


_NOT_APPLIED = (
    "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "bad_words_ids",
    "min_length", "min_new_tokens", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens",
    "begin_suppress_tokens", "exponential_decay_length_penalty", "guidance_scale", "watermarking_config",
    "renormalize_logits", "remove_invalid_values",
)  # fmt: skip
"""The settings of transformers 5.23 (`_get_logits_processor`) that change which token is chosen, and that the engine
does not support."""
_NEUTRAL = (None, False, 0, 1.0)
"""The values with which the settings of `_NOT_APPLIED` change nothing."""


@dataclass(frozen=True)
class Sampling:
    """Holds a request's settings for the choice of tokens.

    Attributes:
        do_sample: whether tokens are drawn; otherwise the likeliest token is taken, and temperature, top_k, top_p and
            seed change nothing.
        temperature, top_k, top_p, repetition_penalty: as in transformers. None takes the value of the checkpoint's
            generation settings, or transformers' default if they have none. top_k=0 and top_p=1 allow all tokens.
        seed: the seed of the request's own random numbers; None takes an unpredictable seed.
        logits_processor: functions that may change the logits, called before temperature, top_k and top_p. Those with
            an attribute `comes_first` that is true are called before the repetition penalty too.
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
        """Prepares the processors and the random generator of one request.

        Args:
            settings: the settings of the request.
            defaults: the model's generation settings.
            device: the device of the logits.

        Raises:
            ConfigurationError: a setting is invalid.
        """
        _check(settings)
        self._do_sample = settings.do_sample
        self._device = device
        self._told = [hook.chosen for hook in settings.logits_processor if hasattr(hook, "chosen")]
        self._generator: torch.Generator | None = None
        if settings.do_sample:
            self._generator = torch.Generator(device)
            if settings.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(settings.seed)
        try:
            self._processors = LogitsProcessorList(_processors(settings, defaults))
            self._without_hooks = LogitsProcessorList(_processors(replace(settings, logits_processor=()), defaults))
        except (ValueError, TypeError):  # transformers' own text names the setting, but not in one plain line
            raise ConfigurationError(
                "temperature and repetition_penalty are above 0, top_k is a whole number from 0 and top_p from 0 to 1: "
                f"got {settings!r}"[:300]
            ) from None

    def next_token(self, token_ids: Sequence[int], logits: torch.Tensor) -> int:
        """Returns the id of the answer's next token.

        Args:
            token_ids: the tokens of the prompt and of the answer so far.
            logits: float32, shape (vocab_size,); each number is finite or minus infinity.

        Raises:
            ConfigurationError: a logits processor returned NaN, or logits of another shape. A token outside the
                vocabulary would fail in the next step, and with it the requests of that step.
            RuntimeError: no token can be drawn, for example because a small temperature made all logits infinite.
        """
        scores = logits[None]
        if self._processors:
            scores = self._processors(torch.tensor([token_ids], device=self._device), scores.clone())
            if scores.shape != (1, len(logits)):
                raise ConfigurationError(
                    f"a logits_processor returns logits of the shape {(1, len(logits))}, got {tuple(scores.shape)}"
                )
            if bool(torch.isnan(scores).any()):
                raise ConfigurationError("a logits_processor returned NaN")
        if self._generator is None:
            token_id = int(scores.argmax(dim=-1))
        else:
            token_id = int(torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=self._generator))
        for tell in self._told:
            tell(token_id)
        return token_id

    def fork(self) -> Sampler:
        """Returns a sampler that predicts this one: it draws with the random numbers that this sampler draws with
        next. It does not call the user's logits processors, which may count their calls."""
        twin = copy.copy(self)
        twin._processors, twin._told = self._without_hooks, []
        if self._generator is not None:
            twin._generator = torch.Generator(self._generator.device)
            twin._generator.set_state(self._generator.get_state())
        return twin


def check_defaults(defaults: GenerationConfig) -> None:
    """Checks that a checkpoint's generation settings do not make `generate` choose other tokens than a `Sampler` does.

    Raises:
        ConfigurationError: there is a setting that does; the error names this setting.
    """
    for name in _NOT_APPLIED:
        if getattr(defaults, name, None) not in _NEUTRAL:
            raise ConfigurationError(
                f"the checkpoint's generation settings have {name}, which the engine does not apply"
            )


def _processors(settings: Sampling, defaults: GenerationConfig) -> list[Any]:
    """Returns the processors in the order in which they are called: that of transformers, except that hooks with
    `comes_first` are called before all others."""

    def setting(name: str, neutral: Any) -> Any:
        chosen = getattr(settings, name)
        inherited = getattr(defaults, name, None) if chosen is None else chosen
        return neutral if inherited is None else inherited

    made: list[Any] = [hook for hook in settings.logits_processor if _comes_first(hook)]
    if (penalty := setting("repetition_penalty", 1.0)) != 1.0:
        made.append(RepetitionPenaltyLogitsProcessor(penalty))
    made.extend(hook for hook in settings.logits_processor if not _comes_first(hook))
    if not settings.do_sample:
        return made
    if (temperature := setting("temperature", 1.0)) != 1.0:
        made.append(TemperatureLogitsWarper(temperature))
    if (top_k := setting("top_k", _DEFAULT_TOP_K)) != 0:
        made.append(TopKLogitsWarper(top_k))
    if (top_p := setting("top_p", 1.0)) != 1.0:
        made.append(TopPLogitsWarper(top_p))
    return made


def _comes_first(hook: LogitsHook) -> bool:
    return bool(getattr(hook, "comes_first", False))


def _check(settings: Sampling) -> None:
    """Refuses settings of a wrong type, which would otherwise fail in the middle of an answer."""
    true_or_false("do_sample", settings.do_sample)
    seed = settings.seed
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not -(1 << 63) <= seed < 1 << 63):
        raise ConfigurationError(f"seed is a whole number of 64 bits, got {ascii(seed)[:40]}")
    if not all(callable(each) for each in settings.logits_processor):
        raise ConfigurationError("logits_processor is a list of functions of token ids and logits")
