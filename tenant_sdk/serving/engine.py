"""This module holds the engine, which answers many requests, each with its own adapter and settings, over one remote
base model.

The engine has one thread (loop.py), which plans a step, computes it with the model, chooses each request's next token,
and begins again. All other threads submit requests, read answers and cancel. `ContextLimit` bounds the tokens of a
request, prompt and answer together, by the model's context and the engine's own limit. `Engine.explain` prints how many
requests fit, and what the provider sees.

Guarantees:
- a request gets the same tokens as from `TenantClient.generate`, up to rounding. Other requests, and the time at which
  the request joined, do not change these tokens;
- a failure that concerns one request ends only that request, with an error of one line. Such failures are an adapter
  that cannot be loaded, a logits hook or `on_text` that raises, a tokenizer that fails, and a value that is not finite
  (loop.py). If the provider fails in a step, the requests of that step fail, and waiting requests are still
  served. If a reply fails its check, the session is over and all requests fail;
- the engine retries nothing by itself.

The provider sees the number of rows of every step, which is a sum over all requests. So the provider sees prompts join
and answers end, as far as their lengths and number show in these sums. The provider does not see which request a row
belongs to, nor which adapter is used, since the tenant applies adapters. Without `verify`, a dishonest provider may
learn from visible effects of its wrong replies. In the engine, as in `generate`, such effects are on when an answer
ends, and on whether a DoRA adapter can be loaded (adapters/host.py). A request with `fixed_length` shows no such
end. Its rows go on to its length limit, whatever its tokens, stop strings and values are, and if its logits hook or
`on_text` raises, so that only its submission, its limit and a `cancel` show. The time at which a request is admitted
never depends on its own text. It depends on lengths, limits, callers, the loading of its adapter, the lengths of other
answers so far, and their ends. A request that does not have `fixed_length` may be preempted for want of memory
(scheduler.py): its prompt and its answer so far are then computed again, under new masks, as rows of a prompt. That too
follows from numbers of tokens alone.

With speculation every answer has 1 + `num_drafted` rows in every step, whatever is drafted, and the number of its steps
shows how many drafted tokens were accepted. With `prefix_bytes`, a shorter prompt also shows that a request begins like
an earlier one of the same caller (prefix_cache.py). A request with `fixed_length` never shows this, and padded prompts
(`pad_rows`) and `prefix_bytes` exclude each other.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

from tenant_sdk.generate import DEFAULT_NEW_TOKENS, answer_length, prompt_tokens, stop_ids_given
from tenant_sdk.options import from_keywords, takes_options
from tenant_sdk.plain_values import WrongOption, positive
from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.adapters.loan import BaseModelLoan, Lender, NoAdapters
from tenant_sdk.serving.kv import KvLayout, kv_layout, kv_place
from tenant_sdk.serving.loop import DuringStep, EngineStatus, ServingLoop, StepRunner
from tenant_sdk.serving.prefix_cache import BLOCK_TOKENS, PrefixCache, block_bytes
from tenant_sdk.serving.ragged import RaggedModel
from tenant_sdk.serving.requests import Answer, Ending, Prompt, Request
from tenant_sdk.serving.sampling import Sampler, Sampling, check_defaults
from tenant_sdk.serving.scheduler import Budget, Scheduler
from tenant_sdk.serving.settings import EngineKeywords, EngineOptions, RequestKeywords, RequestOptions
from tenant_sdk.serving.speculation.settings import make_drafter, num_drafted_of
from tenant_sdk.session_protocol import TextSession
from tenant_sdk.text.ready import ReadyText, ReadyTokens
from tenant_sdk.text.rows import pad_token
from tenant_sdk.text.source import SafeDecoding, special_texts
from wire.errors import ConfigurationError, VeilbaseError


class ContextLimit:
    """Holds the largest number of tokens that a request may have, prompt and answer together."""

    def __init__(self, max_context: int | None, model_context: int, bucket: int | None) -> None:
        """Checks the engine's limit.

        Args:
            max_context: the engine's limit, in tokens; None means the model's context.
            model_context: the tokens that the model's context holds.
            bucket: the number of tokens to which prompts are padded; None if they are not padded.

        Raises:
            ConfigurationError: the limit is larger than the model's context, or leaves no room for an answer.
        """
        self.num_tokens = model_context if max_context is None else positive("max_context", max_context)
        if self.num_tokens > model_context:
            raise ConfigurationError(
                f"max_context is {self.num_tokens}, and this model takes {model_context} tokens at most"
            )
        if max_context is not None and self.num_tokens <= (bucket or 1):
            raise ConfigurationError(
                f"max_context is {self.num_tokens}: a prompt of {bucket or 1} tokens leaves no room for an answer"
            )
        self._is_own = self.num_tokens < model_context

    def answer_length(self, asked: int | None, num_prompt: int, default: int = DEFAULT_NEW_TOKENS) -> int:
        """Returns the length limit of an answer, in tokens.

        Args:
            asked: the limit that the user gave; None means `default`, or fewer if there is less room.
            num_prompt: the number of tokens of the prompt.
            default: a limit above 0.

        Raises:
            ConfigurationError: `asked` is not a whole number above 0, or there is no room for it, or for any answer.
        """
        if asked is not None:
            positive("max_new_tokens", asked)
        room = self.num_tokens - num_prompt
        if self._is_own and room < (asked or 1):
            advice = f"ask for at most {room}" if room > 0 else f"shorten the prompt by at least {1 - room}"
            raise WrongOption(
                f"the prompt has {num_prompt} tokens, and prompt and answer together may have {self.num_tokens} here "
                f"(max_context): {advice}",
                "max_new_tokens" if room > 0 else "prompt",
            )
        answer_length(asked, num_prompt, 0, self.num_tokens)  # Raises an error if there is no room.
        return min(default, room) if asked is None else asked


_LENGTHS = (1024, 8192, 32768)
"""The request lengths, in tokens, for which the text says how many requests fit."""
_VISIBLE = (
    "the rows of every step, summed over all requests: prompts that join, as far as lengths and numbers show in the "
    "sums, and answers that end; not which row is whose, nor which adapter"
)
_DORA = (
    "show when they are brought into host memory, by calls with as many rows as their ranks add up to in each layer "
    "group; steps with them look like any other"
)
_TIMES = "show, and with them the tenant's own work between calls, which takes longer with some kinds of adapters"
_ENDS = (
    "show, unless fixed_length=True: then the rows go on to the length limit, and only the limit and the time of the "
    "request show"
)
_ENDS_EARLIER = (
    "show. The number of steps of an answer shows how many drafted tokens were accepted, so how well its text can be "
    "foretold, or how much it copies"
)
"""The line about the ends of answers for an engine with speculation, which refuses fixed_length."""


_GROWS = (
    "grows with their answers. If it runs out, the request that began last waits, and its tokens are computed again: "
    "the provider sees rows as of a prompt"
)
_GROWS_NOT = ". A request with fixed_length=True has all its memory from the beginning"
_HITS = (
    "to the provider, a request whose prompt begins like an earlier one of the same caller and adapter shows as a "
    "shorter prompt, in steps of {tokens} tokens; to other callers, only that the room for kept prompts is used. A "
    "request with fixed_length=True neither uses nor leaves a kept prompt"
)


def explain(
    layout: KvLayout, budget: Budget, context_length: int, prefix_bytes: int = 0, adapters: str = "",
    default_new_tokens: int = DEFAULT_NEW_TOKENS,
) -> str:  # fmt: skip
    """Returns the text, one line for each topic.

    Args:
        layout: how keys and values are kept.
        budget: the scheduler's limits.
        context_length: the most tokens of a request, prompt and answer together.
        prefix_bytes: the most bytes of kept prompts.
        adapters: how many adapters fit; see `Lender.describe`.
        default_new_tokens: the length limit of an answer without one of its own, to an empty prompt.
    """
    lengths = sorted({min(length, context_length) for length in _LENGTHS})
    fitting = ", ".join(
        f"{min(budget.kv_bytes // layout.bytes_for(length), budget.max_running)} of {length} tokens"
        for length in lengths
    )
    kept = f"{budget.kv_bytes / 1e6:.0f} MB of KV ({str(layout.dtype).removeprefix('torch.')})"
    drafted = budget.num_drafted
    answers = f"{1 + drafted} rows for each answer, whatever is drafted" if drafted else "a row for each answer"
    lines = {
        "tokens of a request": f"{context_length} at most, prompt and answer together",
        "answers without a limit": f"{default_new_tokens} tokens at most, fewer where the prompt leaves fewer",
        "requests at a time": f"{budget.max_running} at most; in {kept} {fitting}",
        "memory of requests": _GROWS if drafted else _GROWS + _GROWS_NOT,
        "rows a step": f"{budget.step_tokens} at most: {answers}, and pieces of prompts",
        **({"adapters that fit": adapters} if adapters else {}),
        "the provider sees": _VISIBLE,
        "adapters with DoRA": _DORA,
        "times of calls": _TIMES,
        "ends of answers": _ENDS_EARLIER if drafted else _ENDS,
    }
    if prefix_bytes:
        num_tokens = prefix_bytes // block_bytes(layout) * BLOCK_TOKENS
        lines["kept prompts"] = f"{prefix_bytes / 1e6:.0f} MB beside the KV of running requests, {num_tokens} tokens"
        lines["hits on kept prompts"] = _HITS.format(tokens=BLOCK_TOKENS)
    width = max(len(name) for name in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


MakeStore = Callable[[Any, Callable[[], None]], Lender]
"""A function that makes the store of adapters. It takes the model and a function that wakes the engine."""

MOST_STOP_CHARACTERS = 4096
"""The most characters of a request's stop strings together. The engine's thread looks for all of them at every token,
while the answers of other requests wait."""


class Engine:
    """Answers requests until the engine is closed. An engine is a context manager.

    Example:
        with TenantClient("grpcs://host:8443", identity="acme/") as client, Engine(client) as engine:
            answers = [engine.submit(prompt) for prompt in prompts]
            for answer in answers:
                print(answer.result())
    """

    @takes_options(EngineOptions)
    def __init__(
        self,
        client: TextSession,
        make_slots: MakeStore | str | Path | None = None,
        *,
        max_waiting: int = 10_000,
        default_new_tokens: int | None = DEFAULT_NEW_TOKENS,
        during_step: DuringStep = contextlib.nullcontext,
        clock: Callable[[], float] = time.monotonic,
        **options: Unpack[EngineKeywords],
    ) -> None:
        """Loads a model and begins to serve.

        Args:
            client: a connected `TenantClient`, which must stay open while the engine works.
            make_slots: the folder of the adapters, one subfolder each, or a function that makes a store over the model
                and calls its second argument whenever an adapter is ready; None serves only the base model.
            max_waiting: the most requests that wait.
            default_new_tokens: the length limit of an answer for which `submit` gets none, lowered to what the context
                leaves. None means what the checkpoint's generation settings say, or all that the context and kv_bytes
                leave; with fixed_length, 128.
            during_step: returns a context in which the engine's thread computes each step, so that other work can wait
                for it.
            clock: returns the present time in seconds; tests inject their own clock.
            **options: those of `EngineOptions`.

        Raises:
            ConfigurationError: the model cannot be served in this way, or a setting is impossible.
            VeilbaseError: the provider did not deliver the model or the mask's hints.
        """
        self._client = client
        own = from_keywords(EngineOptions, options, "Engine")
        own.check()
        positive("max_waiting", max_waiting)
        self._speculation = own.speculation
        self._context = ContextLimit(own.max_context, client.context_length, client.bucket)
        if default_new_tokens is not None:
            positive("default_new_tokens", default_new_tokens)
        self._default_new_tokens = default_new_tokens
        num_drafted = num_drafted_of(own.speculation)
        budget = Budget(own.step_tokens, own.max_running, own.kv_bytes, own.overtaking_s, num_drafted)
        self._model = client.load_model()
        check_defaults(self._model.generation_config)
        ragged = RaggedModel(self._model)
        self._layout = kv_layout(self._model, own.kv_dtype, own.step_tokens)
        drafter = make_drafter(own.speculation, client.tokenizer, self._model, own.kv_dtype, own.step_tokens)
        if drafter is not None:
            self._layout = replace(self._layout, beside=drafter.layout)
        self._check_holds_a_request(own.kv_bytes)
        possible = range(1, self._context.num_tokens + 1)
        self._most_kv_tokens = bisect_right(possible, own.kv_bytes, key=self._layout.bytes_for)
        self._prefixes = self._prefix_cache(own.prefix_bytes)
        place = kv_place(own.kv_device, self._model.device)
        self.scheduler = Scheduler(budget)
        self._tokenizer = client.tokenizer
        self._own_tokenizer = copy.deepcopy(client.tokenizer)  # Other threads encode while the engine's thread decodes.
        self._special = special_texts(self._own_tokenizer)
        self._text_lock = threading.Lock()
        woken = threading.Event()
        self._lender = _open_store(make_slots, self._model, woken.set)
        runner = StepRunner(ragged, self._layout, self._lender, place, drafter)
        self._loop = ServingLoop(
            self._model, self.scheduler, self._layout, runner, self._lender,
            woken=woken, max_waiting=max_waiting, clock=clock, prefixes=self._prefixes,
            during_step=during_step,
        )  # fmt: skip
        try:
            client.fetch_hints()
        except BaseException:
            self._lender.close()
            raise
        self._loop.start()

    def _prefix_cache(self, num_bytes: int) -> PrefixCache | None:
        if num_bytes == 0:
            return None
        if self._client.bucket is not None:
            raise ConfigurationError(
                "prefix_bytes and pad_rows exclude each other: a hit would show in the number of rows, which pad_rows "
                "keeps the same for every prompt"
            )
        return PrefixCache(replace(self._layout, beside=None), num_bytes)

    def _check_holds_a_request(self, kv_bytes: int) -> None:
        smallest = self._layout.bytes_for(2 if self._client.bucket is None else self._client.bucket + 1)
        if kv_bytes < smallest:
            raise ConfigurationError(
                f"kv_bytes is {kv_bytes}, and the shortest request takes {smallest}: nothing could be answered"
            )

    @takes_options(RequestOptions)
    def submit(
        self,
        prompt: str | ReadyText | ReadyTokens | Iterable[Mapping[str, str]],
        adapter: str | None = None,
        max_new_tokens: int | None = None,
        **options: Unpack[RequestKeywords],
    ) -> Answer:
        """Queues a request and returns at once.

        Args:
            prompt: a user's message, or a list of messages; without a chat template the text is continued as it is. A
                `ReadyText` is continued as it is also with a chat template; `ReadyTokens` are token ids.
            adapter: the adapter's name in the store; None means the base model.
            max_new_tokens: the length limit of the answer; None means the engine's default_new_tokens, which is 128 by
                default, or fewer if the context leaves fewer.
            **options: those of `RequestOptions`.

        Returns:
            The handle of the answer.

        Raises:
            ConfigurationError: a prompt, adapter, length or setting is invalid, or the engine was closed.
            QuotaExceeded: too many requests wait.
            VeilbaseError: the engine has failed; the error states the reason.
        """
        own = from_keywords(RequestOptions, options, "submit")
        own.check()
        if own.fixed_length and self._speculation is not None:
            raise WrongOption(
                "fixed_length does not go with speculation: the number of steps shows the text", "fixed_length"
            )
        sampling = Sampling(
            own.do_sample, own.temperature, own.top_k, own.top_p, own.repetition_penalty, own.seed,
            tuple(own.logits_processor),
        )  # fmt: skip
        settings = self._model.generation_config
        sampler = Sampler(sampling, settings, self._model.device)
        stop_ids = stop_ids_given(settings.eos_token_id if own.eos_token_id is None else own.eos_token_id)
        encoded = self._encode(prompt)
        default = self._default_length(encoded.num_rows, own.fixed_length)
        num_new = self._context.answer_length(max_new_tokens, encoded.num_rows, default)
        ending = Ending(num_new, frozenset(stop_ids), _stop_strings(own.stop), own.fixed_length, self._special)
        return self._enter(encoded, ending, sampler, adapter, own)

    def _default_length(self, num_prompt: int, fixed_length: bool) -> int:
        """Returns the length limit of an answer for which the user gave none, in tokens; see `default_new_tokens`."""
        if self._default_new_tokens is not None:
            return self._default_new_tokens
        if fixed_length:  # Its rows go on to the limit, which would take minutes or hours of everybody's steps.
            return DEFAULT_NEW_TOKENS
        limits = [self._most_kv_tokens - num_prompt + 1]  # The last token needs no KV.
        own, whole = self._own_limits()
        limits += [] if own is None else [own]
        limits += [] if whole is None or whole <= num_prompt else [whole - num_prompt]
        return max(min(limits), 1)

    def _own_limits(self) -> tuple[int | None, int | None]:
        """Returns the checkpoint's own limits of an answer, and of prompt and answer together, in tokens."""
        settings = self._model.generation_config
        own, whole = (
            value if type(value) is int and value > 0 else None
            for value in (settings.max_new_tokens, settings.max_length)
        )
        return own, whole

    def status(self) -> EngineStatus:
        """Returns the numbers of running and waiting requests, and the bytes of their keys and values."""
        return self._loop.status()

    def step_s(self) -> float:
        """Returns for how many seconds the present step has been computed; 0 between steps."""
        return self._loop.step_s()

    def explain(self) -> str:
        """Prints and returns a text that states how many requests fit and what the provider sees of them.

        `TenantClient.explain` states what the mask hides, which also holds for the engine.
        """
        kept = 0 if self._prefixes is None else self._prefixes.budget_bytes
        context = self._context.num_tokens
        default = min(self._default_length(0, fixed_length=False), context)
        text = explain(self._layout, self.scheduler.budget, context, kept, self._lender.describe(), default)
        print(text)
        return text

    def _encode(self, prompt: Any) -> Prompt:
        with self._text_lock:
            ids, seen = prompt_tokens(self._client, self._model, self._tokenizer, prompt)
            return Prompt(ids[seen.count(0) :], seen.count(0), pad_token(self._tokenizer))

    def _enter(
        self, prompt: Prompt, ending: Ending, sampler: Sampler, adapter: str | None, options: RequestOptions
    ) -> Answer:  # fmt: skip
        most_rows = prompt.num_rows + ending.max_new_tokens - 1
        self.scheduler.budget.check_fits(self._layout.bytes_for(most_rows), self._layout.bytes_for(prompt.num_rows))
        number = self._loop.next_number()
        loan = BaseModelLoan() if adapter is None else self._lender.reserve(adapter)
        answer = Answer(len(prompt.token_ids), lambda: self._loop.cancel(number))
        keeps = self._prefixes is not None and not ending.fixed_length and not options.pools
        kept = self._prefixes.of(options.caller) if self._prefixes is not None and keeps else None
        request = Request(
            number, prompt, ending, sampler, loan, answer, SafeDecoding(self._own_tokenizer), options.on_text, kept,
            pools=options.pools,
        )  # fmt: skip
        try:
            self._loop.add(request, options.caller)
        except VeilbaseError:
            loan.release()
            raise
        return answer

    def close(self) -> None:
        """Ends the engine after the step that is being computed; answers that are not complete fail."""
        self._loop.close()

    def __enter__(self) -> Engine:
        """Returns the engine, which already serves requests."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _open_store(given: MakeStore | str | Path | None, model: Any, wake: Callable[[], None]) -> Lender:
    """Returns the store of adapters for an engine's model.

    Args:
        given: the engine's `make_slots`.
        model: the engine's model.
        wake: wakes the engine; the store calls it whenever an adapter is ready or has failed.

    Raises:
        ConfigurationError: `given` is none of what an engine takes, or the folder cannot be used.
    """
    if given is None:
        return NoAdapters()
    if isinstance(given, str | Path):
        return AdapterStore(model, given, on_ready=wake)
    if not callable(given):
        raise ConfigurationError(
            f"the adapters of an engine are a folder, or a function of a model and of what wakes the engine, got "
            f"{type(given).__name__}"
        )
    made = given(model, wake)
    if isinstance(made, AdapterStore) and made.on_ready is None:
        made.on_ready = wake  # Otherwise a request would wait for ever for an adapter that is ready.
    return made


def _stop_strings(given: str | Sequence[str]) -> tuple[str, ...]:
    """Returns stop strings as a tuple.

    Raises:
        ConfigurationError: a stop string is empty or is not a string, or they are too long together.
    """
    stops = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise WrongOption("stop is a text or a list of texts, none of them empty", "stop")
    if sum(map(len, stops)) > MOST_STOP_CHARACTERS:
        raise WrongOption(f"stop strings have at most {MOST_STOP_CHARACTERS} characters together", "stop")
    return stops
