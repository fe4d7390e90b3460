"""Answers a list of prompts through an engine, with a progress bar: `TenantClient.generate_many`."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tenant_sdk.progress import counting
from tenant_sdk.serving.answer import Answer
from tenant_sdk.serving.engine import Engine, MakeSlots
from tenant_sdk.session_protocol import TextSession
from wire.errors import ConfigurationError

_OF_THE_ENGINE = ("kv_dtype", "kv_bytes", "max_running", "step_tokens")
"""Options that are the engine's; all others are those of each request."""


def generate_many(
    client: TextSession,
    prompts: Sequence[str | Iterable[Mapping[str, str]]],
    adapters: str | Sequence[str | None] | None = None,
    max_new_tokens: int | None = None,
    progress: bool = True,
    make_slots: MakeSlots | None = None,
    **options: Any,
) -> list[str]:
    """Answers all prompts, as `TenantClient.generate_many` describes it.

    Args:
        client: connected or not.
        prompts, adapters, max_new_tokens, progress, options: as of `TenantClient.generate_many`.
        make_slots: makes the store of adapters; None where there is none.

    Returns:
        The answers, in the order of the prompts.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise ConfigurationError(f"prompts is a list of prompts, got {type(prompts).__name__}")
    names = _one_each(adapters, len(prompts))
    own = {name: options.pop(name) for name in _OF_THE_ENGINE if name in options}
    if not prompts:
        return []
    with (
        Engine(client, make_slots, max_waiting=len(prompts), **own) as engine,
        counting("answering", progress) as report,
    ):
        done = _Counter(len(prompts), report)
        answers: list[Answer] = []
        for prompt, name in zip(prompts, names, strict=True):
            answers.append(engine.submit(prompt, name, max_new_tokens, **options))
            answers[-1].add_done_callback(done)
        return [answer.result() for answer in answers]


class _Counter:
    """Moves the progress bar whenever an answer is done, in whatever order they are."""

    def __init__(self, num_all: int, report: Any) -> None:
        self._num_done, self._num_all, self._report = 0, num_all, report
        self._lock = threading.Lock()
        report(0, num_all)

    def __call__(self, answer: Answer) -> None:
        with self._lock:
            self._num_done += 1
            self._report(self._num_done, self._num_all)


def _one_each(adapters: str | Sequence[str | None] | None, num_prompts: int) -> list[str | None]:
    """Returns the adapter of each prompt.

    Raises:
        ConfigurationError: there are more or fewer adapters than prompts.
    """
    if adapters is None or isinstance(adapters, str):
        return [adapters] * num_prompts
    if len(adapters) != num_prompts:
        raise ConfigurationError(f"expected one adapter for each of {num_prompts} prompts, got {len(adapters)}")
    return list(adapters)
