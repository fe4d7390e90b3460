"""This module translates the settings of a request in OpenAI's form to arguments of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tenant_sdk.endpoint.errors import bad_request
from tenant_sdk.endpoint.hooks import Biases, Penalties
from tenant_sdk.endpoint.schema import ChatRequest, CompletionRequest
from tenant_sdk.serving.sampling import LogitsHook

_LEAST_TEMPERATURE = 1e-5
"""The smallest temperature by which logits are divided. A smaller one would make float32 logits infinite."""


def engine_options(
    request: ChatRequest | CompletionRequest, index: int, hooks: Sequence[LogitsHook], vocab_size: int
) -> dict[str, Any]:
    """Returns the keyword arguments of `Engine.submit` for one choice.

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
        "max_new_tokens": _most_tokens(request),
        "logits_processor": [*hooks, *_own_hooks(request, vocab_size)],
    }


def _most_tokens(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens
    return request.max_tokens


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
