"""This module implements `TenantClient.generate_many`: it answers a list of prompts through an engine, with a progress
bar.

Guarantees:
- no row of a prompt is sent before all prompts are accepted, so that a prompt that is refused costs nothing;
- a failure that concerns one prompt leaves the other prompts their answers. A failure of the provider, of the mask or
  of the tenant's disk ends the call at once.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from runtime.command_line import instead
from tenant_sdk.options import from_keywords, option_names, split_keywords
from tenant_sdk.plain_values import adapter_folder
from tenant_sdk.progress import counting
from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.engine import Engine, MakeStore
from tenant_sdk.serving.requests import Answer
from tenant_sdk.serving.settings import NOT_OF_MANY, EngineOptions, RequestOptions, StoreOptions
from tenant_sdk.session_protocol import TextSession
from wire.errors import (
    AccessError,
    ConfigurationError,
    MaskError,
    ProtocolError,
    StorageError,
    TransportError,
    VeilbaseError,
)

Adapters = str | Path | Sequence[str | Path | None] | None
"""An adapter folder for all prompts, or one for each prompt; None means the base model."""
OF_THE_STORE = tuple(name for name in option_names(StoreOptions) if name not in NOT_OF_MANY)
"""The options that go to the store of adapters."""
_OF_ALL_PROMPTS = (AccessError, TransportError, ProtocolError, MaskError, StorageError)
"""The errors that do not concern one prompt alone. The prompts that are left would fail as well, each perhaps after a
timeout."""


class PromptsFailed(VeilbaseError):
    """Some prompts of `generate_many` failed while the others were answered. The message names the first that failed.

    Attributes:
        answers: the answers, in the order of the prompts, with None for each prompt that failed.
        failures: the error of each prompt that failed, by the prompt's index.
    """

    def __init__(
        self, text: str, answers: Sequence[str | None] = (), failures: Mapping[int, VeilbaseError] | None = None
    ) -> None:  # fmt: skip
        """Makes the error with the message `text`; see the attributes."""
        super().__init__(text)
        self.answers, self.failures = list(answers), dict(failures or {})


def generate_many(
    client: TextSession,
    prompts: Sequence[str | Iterable[Mapping[str, str]]],
    adapters: Adapters = None,
    max_new_tokens: int | None = None,
    progress: bool = True,
    **options: Any,
) -> list[str]:
    """Answers all prompts; see `TenantClient.generate_many`.

    Args:
        client: the session, connected or not.
        prompts, adapters, max_new_tokens, progress, options: as in `TenantClient.generate_many`.

    Returns:
        The answers, in the order of the prompts.

    Raises:
        PromptsFailed: some prompts failed after all were accepted; the others were answered.
        ConfigurationError: a prompt, an adapter, a length or an option is impossible; no prompt was sent.
        VeilbaseError: the provider, the mask or the tenant's disk failed.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise ConfigurationError(f"prompts is a list of prompts, got {type(prompts).__name__}")
    check_options(options)
    kinds = RequestOptions, EngineOptions, StoreOptions
    of_each, own, store = split_keywords(options, *kinds, method="generate_many")
    names, make_store = _named(_one_each(adapters, len(prompts)), store)
    if not prompts:
        return []
    start = _Start()
    with (
        Engine(client, make_store, max_waiting=len(prompts), during_step=start.step, **own) as engine,
        start.decided(),  # before the engine is closed, which waits for the step that waits for this
        counting("answering", progress) as report,
    ):
        done = _Counter(len(prompts), report)
        answers = [
            _accepted(index, engine, prompt, name, max_new_tokens, of_each)
            for index, (prompt, name) in enumerate(zip(prompts, names, strict=True))
        ]
        for answer in answers:
            answer.add_done_callback(done)
        start.accept()
        return _texts(answers)


class _Start:
    """Keeps an engine from its first step until all prompts are accepted. If one is refused, no step is computed."""

    def __init__(self) -> None:
        self._is_decided, self._is_accepted = threading.Event(), False

    def accept(self) -> None:
        """Lets the engine compute steps."""
        self._is_accepted = True
        self._is_decided.set()

    @contextlib.contextmanager
    def decided(self) -> Iterator[None]:
        """Returns a context after which no step waits any more: without `accept`, all steps fail."""
        try:
            yield
        finally:
            self._is_decided.set()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Returns a context that begins once the prompts are accepted; the engine computes a step in it.

        Raises:
            ConfigurationError: a prompt was refused.
        """
        self._is_decided.wait()
        if not self._is_accepted:
            raise ConfigurationError("another prompt of generate_many was refused")
        yield


def _accepted(
    index: int, engine: Engine, prompt: Any, name: str | None, max_new_tokens: int | None, options: Mapping[str, Any]
) -> Answer:  # fmt: skip
    """Submits a prompt.

    Raises:
        VeilbaseError: the prompt was refused; the error is that of `Engine.submit`, and names the prompt's index.
    """
    try:
        return engine.submit(prompt, name, max_new_tokens, **options)
    except VeilbaseError as exc:
        raise _with_index(index, exc) from None  # a cause could quote the prompt


def _with_index(index: int, failure: VeilbaseError) -> VeilbaseError:
    """Returns a copy of an error whose message names the prompt's index."""
    named = copy.copy(failure)
    named.args = (_naming(index, failure),)
    return named


def _naming(index: int, failure: VeilbaseError) -> str:
    return f"prompts[{index}]: {failure}"


def _texts(answers: Sequence[Answer]) -> list[str]:
    """Waits for all answers and returns their texts.

    Raises:
        PromptsFailed: some prompts failed, and the others were answered.
        VeilbaseError: the provider, the mask or the disk failed; answers that are left are not waited for.
    """
    texts: list[str | None] = []
    failures: dict[int, VeilbaseError] = {}
    for index, answer in enumerate(answers):
        try:
            texts.append(answer.result())
        except _OF_ALL_PROMPTS:
            raise
        except VeilbaseError as exc:
            texts.append(None)
            failures[index] = exc
    if failures:
        first, failure = next(iter(failures.items()))
        more = f" ({len(failures)} of {len(answers)} prompts failed)" if len(failures) > 1 else ""
        raise PromptsFailed(f"{_naming(first, failure)}{more}", texts, failures)
    return [text for text in texts if text is not None]


class _Counter:
    """Moves the progress bar whenever an answer is done, whatever the order of the answers."""

    def __init__(self, num_all: int, report: Any) -> None:
        self._num_done, self._num_all, self._report = 0, num_all, report
        self._lock = threading.Lock()
        report(0, num_all)

    def __call__(self, answer: Answer) -> None:
        with self._lock:
            self._num_done += 1
            self._report(self._num_done, self._num_all)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuses options that neither the engine, nor the store of adapters, nor a request has.

    Raises:
        ConfigurationError: there is such an option.
    """
    known = ("adapters", "max_new_tokens", *option_names(RequestOptions), *option_names(EngineOptions), *OF_THE_STORE)
    for name in options:
        if name not in known:
            advice = instead(name, known, "its docstring")
            raise ConfigurationError(f"generate_many does not take {name[:60]}: {advice}")


def _one_each(adapters: Adapters, num_prompts: int) -> list[str | Path | None]:
    """Returns the adapter of each prompt.

    Raises:
        ConfigurationError: there are more or fewer adapters than prompts.
    """
    if adapters is None or isinstance(adapters, str | Path):
        return [adapters] * num_prompts
    if len(adapters) != num_prompts:
        raise ConfigurationError(f"expected one adapter for each of {num_prompts} prompts, got {len(adapters)}")
    return list(adapters)


def _named(
    adapters: Sequence[str | Path | None], options: Mapping[str, Any]
) -> tuple[list[str | None], MakeStore | None]:  # fmt: skip
    """Returns the adapters' names in a store over their common folder, and a function that makes this store; None in
    place of the function if no prompt has an adapter.

    The store keeps the files' numbers unrounded, so that answers are the same as those of `generate`.

    Args:
        adapters: the adapter folder of each prompt.
        options: options of the store.

    Raises:
        ConfigurationError: an adapter folder does not exist, the adapters are not in one folder, or an option is
            impossible.
    """
    from_keywords(StoreOptions, options, "generate_many").check()
    paths: list[Path | None] = []
    for index, each in enumerate(adapters):
        try:
            paths.append(None if each is None else adapter_folder(each).absolute())
        except VeilbaseError as exc:
            raise _with_index(index, exc) from None
    roots = sorted({path.parent for path in paths if path is not None})
    if not roots:
        return [None] * len(paths), None
    if len(roots) > 1:
        raise ConfigurationError(f"the adapters of generate_many lie in one folder, got {len(roots)} folders")

    def make_store(model: Any, wake: Callable[[], None]) -> AdapterStore:
        return AdapterStore(model, roots[0], on_ready=wake, **{**options, "dtype": torch.float32})

    return [None if path is None else path.name for path in paths], make_store
