"""This module translates the settings of a request in OpenAI's form to arguments of the engine.

Biases, penalties and the record of logprobs are logits processors. The engine calls them in its own thread, one request
at a time, with token ids (1, length) and logits (1, vocab_size).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tenant_sdk.endpoint.errors import bad_request
from tenant_sdk.endpoint.schema import ChatRequest, CompletionRequest
from tenant_sdk.serving.sampling import LogitsHook


class Biases:
    """Adds a number to the logits of some tokens (`logit_bias`)."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        """Keeps the biases, by token id."""
        self._ids = torch.tensor(list(biases), dtype=torch.long)
        self._values = torch.tensor(list(biases.values()), dtype=torch.float32)

    def __call__(self, token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits with the biases."""
        values = self._values.to(logits)
        return logits.index_add(1, self._ids.to(logits.device), values[None])


class Penalties:
    """Lowers the logits of tokens that the answer already contains (`frequency_penalty`, `presence_penalty`)."""

    def __init__(self, frequency: float, presence: float) -> None:
        """Keeps both penalties. Source: the formula in OpenAI's documentation of these settings."""
        self._frequency, self._presence = frequency, presence
        self._num_prompt: int | None = None

    def __call__(self, token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits minus the penalties. In the first call `token_ids` is the prompt, which gets no
        penalty."""
        if self._num_prompt is None:
            self._num_prompt = token_ids.shape[1]
        counts = torch.bincount(token_ids[0, self._num_prompt :], minlength=logits.shape[1])[: logits.shape[1]]
        return logits - self._frequency * counts.to(logits) - self._presence * (counts > 0).to(logits)


class LogprobRecord:
    """Records the logprobs of the tokens of one answer, as the model gives them, before any penalty, bias,
    temperature, top_k and top_p.

    The token that was chosen in a step is known only at the next call, or by `steps`, which other threads may call
    while the answer goes on.
    """

    comes_first = True
    """Makes the engine call this hook before the repetition penalty. A penalty near 0 multiplies logits, and the mask's
    error in them, until no rounding covers the error."""

    def __init__(self, num_top: int, rounded: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Makes an empty record.

        Args:
            num_top: how many of the likeliest tokens are kept for each step.
            rounded: returns logprobs in the form in which they may be released.
        """
        self._num_top, self._rounded = num_top, rounded
        self._lock = threading.Lock()
        self._newest: torch.Tensor | None = None
        self._resolved: list[tuple[float, list[tuple[int, float]]]] = []

    def __call__(self, token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Records one step, and returns the logits unchanged."""
        newest = self._rounded(torch.log_softmax(logits[0].float(), dim=-1))
        with self._lock:
            if self._newest is not None:
                self._resolve(self._newest, int(token_ids[0, -1]))
            self._newest = newest
        return logits

    def _resolve(self, logprobs: torch.Tensor, token_id: int) -> None:
        values, ids = logprobs.topk(min(self._num_top, len(logprobs)))
        top = list(zip(ids.tolist(), values.tolist(), strict=True))
        self._resolved.append((float(logprobs[token_id]), top))

    def steps(
        self, token_ids: Sequence[int], start: int = 0
    ) -> list[tuple[int, float, list[tuple[int, float]]]]:  # fmt: skip
        """Returns for each token from `start` on: the token, its logprob, and the likeliest tokens with their logprobs.

        Args:
            token_ids: the first tokens of the answer, or all.
            start: the index of the first token that is returned.
        """
        with self._lock:
            if self._newest is not None and len(self._resolved) < len(token_ids):
                self._resolve(self._newest, token_ids[len(self._resolved)])
                self._newest = None
            resolved = self._resolved[start : len(token_ids)]
        return [(token, *step) for token, step in zip(token_ids[start:], resolved, strict=False)]


_LEAST_TEMPERATURE = 1e-5
"""The smallest temperature by which logits are divided. A smaller one would make float32 logits infinite."""


def engine_options(
    request: ChatRequest | CompletionRequest, index: int, hooks: Sequence[LogitsHook], vocab_size: int
) -> dict[str, Any]:
    """Returns the keyword arguments of `Engine.submit` (`RequestOptions`, and max_new_tokens) for one choice.

    With a temperature of 0, or below `_LEAST_TEMPERATURE`, each token is the likeliest one. Without a temperature, the
    generation settings of the checkpoint decide how tokens are drawn. With a seed, each choice has a seed of its own,
    so that choices differ and a request can be repeated.

    Args:
        request: the request.
        index: the number of the choice, from 0.
        hooks: further logits processors of this choice, called first.
        vocab_size: the number of the tokenizer's tokens.

    Raises:
        HttpError: a setting names a token id that does not exist.
    """
    do_sample = request.temperature is None or request.temperature >= _LEAST_TEMPERATURE
    seed = None if request.seed is None else (request.seed + index + (1 << 63)) % (1 << 64) - (1 << 63)
    return {
        "do_sample": do_sample,
        "temperature": request.temperature if do_sample else None,
        "top_p": request.top_p if do_sample else None,
        "top_k": request.top_k if do_sample else None,
        "repetition_penalty": request.repetition_penalty,
        "seed": seed,
        "stop": request.stops,
        "fixed_length": request.fixed_length,
        "max_new_tokens": getattr(request, request.length_field),
        "logits_processor": [*hooks, *_own_hooks(request, vocab_size)],
    }


def field_names(request: ChatRequest | CompletionRequest) -> dict[str, str]:
    """Returns the names, in the request, of the engine's options that have another name there."""
    prompt = "messages" if isinstance(request, ChatRequest) else "prompt"
    return {"max_new_tokens": request.length_field, "prompt": prompt}


def _own_hooks(request: ChatRequest | CompletionRequest, vocab_size: int) -> list[LogitsHook]:
    hooks: list[LogitsHook] = []
    if request.logit_bias:
        hooks.append(Biases(_biases(request.logit_bias, vocab_size)))
    if request.frequency_penalty or request.presence_penalty:
        hooks.append(Penalties(request.frequency_penalty or 0.0, request.presence_penalty or 0.0))
    return hooks


def _biases(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    if not all(each.isascii() and each.isdigit() and len(each) < 10 and int(each) < vocab_size for each in given):
        raise bad_request(f"logit_bias has token ids from 0 to {vocab_size - 1}", "logit_bias")
    return {int(each): value for each, value in given.items()}
