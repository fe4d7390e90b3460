"""This module holds the engine, which answers many requests, each with its own adapter and settings, over one remote
base model.

The engine has one thread, which plans a step, computes it with the model, chooses each request's next token, and begins
again. All other threads submit requests, read answers and cancel.

Guarantees:
- a request gets the same tokens as from `TenantClient.generate`, up to rounding. Other requests, and the time at which
  the request joined, do not change these tokens;
- a failure that concerns one request ends only that request, with an error of one line. Such failures are an adapter
  that cannot be loaded, a logits hook or `on_text` that raises, a tokenizer that fails, and a value that is not finite
  (lost_rows.py). If the provider fails in a step, the requests of that step fail, and waiting requests are still
  served. If a reply fails its check, the session is over and all requests fail;
- the engine retries nothing by itself.

The provider sees the number of rows of every step, which is a sum over all requests. So the provider sees prompts join
and answers end, as far as their lengths and number show in these sums. The provider does not see which request a row
belongs to, nor which adapter is used, since the tenant applies adapters. Without `verify`, a dishonest provider may
learn from visible effects of its wrong replies. In the engine, as in `generate`, the only such effect is on when an
answer ends. A request with `fixed_length` shows no such end. Its rows go on to its length limit, whatever its tokens,
stop strings and values are, so that only its submission and limit show. The time at which a request is admitted depends
on lengths, limits and the ends of other requests, never on texts.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from tenant_sdk.generate import answer_length, prompt_tokens, stop_ids_given
from tenant_sdk.model.planned_calls import planned_calls
from tenant_sdk.plain_values import positive, true_or_false
from tenant_sdk.serving.adapter_slots import AdapterSlots, BaseModelTicket, NoAdapters
from tenant_sdk.serving.answer import Answer
from tenant_sdk.serving.explain import explain
from tenant_sdk.serving.kv import kv_layout
from tenant_sdk.serving.lost_rows import LosesRows
from tenant_sdk.serving.ragged import RaggedModel
from tenant_sdk.serving.requests import Ending, Prompt, Request
from tenant_sdk.serving.sampling import LogitsHook, Sampler, Sampling, check_defaults
from tenant_sdk.serving.scheduler import Budget, Scheduler, Step
from tenant_sdk.serving.steps import StepRunner
from tenant_sdk.session_protocol import TextSession
from tenant_sdk.text.failures import SafeDecoding
from tenant_sdk.text.rows import pad_token
from wire.errors import ConfigurationError, QuotaExceeded, VeilbaseError, VerificationFailed

MakeSlots = Callable[[Any, Callable[[], None]], AdapterSlots]
"""A function that makes the store of adapters. It takes the model and a function that wakes the engine."""

_CLOSED = "this engine was closed before the answer was complete"


@dataclass(frozen=True)
class EngineStatus:
    """Holds the numbers of an engine's running and waiting requests.

    Attributes:
        num_running: the requests that are admitted, so that their prompts or answers are being computed.
        num_waiting: the requests that are not admitted yet.
        reserved_bytes: the bytes of keys and values (KV) that the running requests reserve.
    """

    num_running: int
    num_waiting: int
    reserved_bytes: int


class Engine:
    """Answers requests until the engine is closed. An engine is a context manager.

    Example:
        with TenantClient("grpcs://host:8443", identity="acme/") as client, Engine(client) as engine:
            answers = [engine.submit(prompt) for prompt in prompts]
            for answer in answers:
                print(answer.result())
    """

    def __init__(
        self,
        client: TextSession,
        make_slots: MakeSlots | None = None,
        *,
        kv_dtype: str = "fp32",
        kv_bytes: int = 1 << 30,
        max_running: int = 16,
        step_tokens: int = 256,
        max_waiting: int = 10_000,
        overtaking_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Loads a model and begins to serve.

        Args:
            client: a connected `TenantClient`, which must stay open while the engine works.
            make_slots: makes the store of adapters; None serves only the base model.
            kv_dtype: the type in which keys and values are kept: fp32, bf16 or fp8.
            kv_bytes: the most bytes of keys and values of all running requests; requests that do not fit wait.
            max_running: the most requests that are answered at a time.
            step_tokens: the most rows of a step. Long prompts are computed in pieces, so that answers do not wait for
                them.
            max_waiting: the most requests that wait.
            overtaking_s: the seconds for which small requests may overtake a request that needs more KV than is free.
            clock: returns the present time in seconds; tests inject their own clock.

        Raises:
            ConfigurationError: the model cannot be served in this way, or a setting is impossible.
        """
        self._client, self._clock, self._max_waiting = client, clock, positive("max_waiting", max_waiting)
        budget = Budget(step_tokens, max_running, kv_bytes, overtaking_s)
        self._model = client.load_model()
        check_defaults(self._model.generation_config)
        ragged = RaggedModel(self._model)
        self._layout = kv_layout(self._model, kv_dtype, step_tokens)
        self._check_holds_a_request(kv_bytes)
        self._scheduler = Scheduler(budget)
        self._lock = threading.Lock()
        self._woken = threading.Event()  # Set without `_lock`, since a store may hold its own lock when it sets this.
        self._requests: dict[int, Request] = {}
        self._cancelled: set[int] = set()
        self._fresh: list[tuple[Request, str]] = []
        self._next_number = 0
        self._is_closed = False
        self._failure: VeilbaseError | None = None
        self._tokenizer = client.tokenizer
        self._own_tokenizer = copy.deepcopy(client.tokenizer)  # Other threads encode while the engine's thread decodes.
        self._text_lock = threading.Lock()
        self._slots: AdapterSlots = NoAdapters() if make_slots is None else make_slots(self._model, self._woken.set)
        self._runner = StepRunner(ragged, self._layout, self._slots)
        try:
            client.fetch_hints()
        except BaseException:
            self._slots.close()
            raise
        self._thread = threading.Thread(target=self._serve, name="veilbase-engine", daemon=True)
        self._thread.start()

    def _check_holds_a_request(self, kv_bytes: int) -> None:
        smallest = self._layout.bytes_for(2 if self._client.bucket is None else self._client.bucket + 1)
        if kv_bytes < smallest:
            raise ConfigurationError(
                f"kv_bytes is {kv_bytes}, and the shortest request takes {smallest}: nothing could be answered"
            )

    def submit(
        self,
        prompt: str | Iterable[Mapping[str, str]],
        adapter: str | None = None,
        max_new_tokens: int | None = None,
        *,
        do_sample: bool = False,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        eos_token_id: int | Sequence[int] | None = None,
        logits_processor: Sequence[LogitsHook] = (),
        fixed_length: bool = False,
        on_text: Callable[[str], None] | None = None,
        caller: str = "",
    ) -> Answer:
        """Queues a request and returns at once.

        Args:
            prompt: a user's message, or a list of messages; without a chat template the text is continued as it is.
            adapter: the adapter's name in the store; None means the base model.
            max_new_tokens: the length limit of the answer; None means 128, or fewer if the context leaves fewer.
            do_sample: whether tokens are drawn; otherwise the likeliest token is taken.
            temperature: as in transformers, above 0. None takes the value of the checkpoint's generation settings; the
                same holds for the next three arguments.
            top_k: the number of likeliest tokens among which one is drawn; 0 means all tokens.
            top_p: the total probability of the likeliest tokens among which one is drawn.
            repetition_penalty: a factor; above 1, it makes repetitions rarer.
            seed: the seed of this answer's own random numbers.
            stop: strings at which the text ends; the text does not include them.
            eos_token_id: tokens at which the text ends; None means those of the model.
            logits_processor: functions of (token ids, logits), such as a grammar, called in the engine's thread.
            fixed_length: whether the rows go on to the length limit after the text has ended.
            on_text: called in the engine's thread with each piece of text; it must return quickly.
            caller: the party that the request is for; the engine shares its running requests among callers.

        Returns:
            The handle of the answer.

        Raises:
            ConfigurationError: a prompt, adapter, length or setting is invalid.
            QuotaExceeded: too many requests wait.
            VeilbaseError: the engine has failed; the error states the reason.
        """
        settings = Sampling(
            do_sample, temperature, top_k, top_p, repetition_penalty, seed, tuple(logits_processor)
        )  # fmt: skip
        true_or_false("fixed_length", fixed_length)
        own_settings = self._model.generation_config
        sampler = Sampler(settings, own_settings, self._model.device)
        stop_ids = stop_ids_given(own_settings.eos_token_id if eos_token_id is None else eos_token_id)
        encoded = self._encode(prompt)
        num_new = self._answer_length(max_new_tokens, encoded.num_rows)
        ending = Ending(num_new, frozenset(stop_ids), _stop_strings(stop), fixed_length)
        return self._enter(encoded, ending, sampler, adapter, on_text, caller)

    def status(self) -> EngineStatus:
        """Returns the numbers of running and waiting requests."""
        with self._lock:
            num_running = self._scheduler.num_running
            return EngineStatus(num_running, len(self._requests) - num_running, self._scheduler.reserved_bytes)

    def explain(self) -> str:
        """Prints and returns a text that states how many requests fit and what the provider sees of them.

        `TenantClient.explain` states what the mask hides, which also holds for the engine.
        """
        text = explain(self._layout, self._scheduler.budget, self._client.context_length)
        print(text)
        return text

    def _encode(self, prompt: Any) -> Prompt:
        with self._text_lock:
            ids, seen = prompt_tokens(self._client, self._model, self._tokenizer, prompt)
            return Prompt(ids[seen.count(0) :], seen.count(0), pad_token(self._tokenizer))

    def _answer_length(self, asked: int | None, num_prompt: int) -> int:
        if asked is not None:
            positive("max_new_tokens", asked)
        return answer_length(asked, num_prompt, 0, self._client.context_length)

    def _enter(
        self, prompt: Prompt, ending: Ending, sampler: Sampler, adapter: str | None, on_text: Any, caller: str
    ) -> Answer:
        self._scheduler.budget.check_fits(self._layout.bytes_for(prompt.num_rows + ending.max_new_tokens - 1))
        with self._lock:
            self._check_open()
            if len(self._requests) - self._scheduler.num_running >= self._max_waiting:
                raise QuotaExceeded(f"{self._max_waiting} requests wait already: try again later")
            number = self._next_number
            self._next_number += 1
        ticket = BaseModelTicket() if adapter is None else self._slots.reserve(adapter)
        answer = Answer(len(prompt.token_ids), lambda: self._cancel(number))
        request = Request(
            number, prompt, ending, sampler, ticket, answer, SafeDecoding(self._own_tokenizer), on_text
        )  # fmt: skip
        with self._lock:
            try:
                self._check_open()
            except VeilbaseError:
                ticket.release()
                raise
            self._requests[number] = request
            self._fresh.append((request, caller))
        self._woken.set()
        return answer

    def _check_open(self) -> None:
        if self._failure is not None:
            raise copy.copy(self._failure)
        if self._is_closed:
            raise ConfigurationError("this engine was closed")

    def _cancel(self, number: int) -> None:
        with self._lock:
            if number in self._requests:
                self._cancelled.add(number)
        self._woken.set()

    def close(self) -> None:
        """Ends the engine after the step that is being computed; answers that are not complete fail."""
        with self._lock:
            self._is_closed = True
        self._woken.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Engine:
        """Returns the engine, which already serves requests."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the engine; see `close`."""
        self.close()

    def _serve(self) -> None:
        """Computes steps until the engine is closed or fails, then ends all requests. The engine's thread runs this."""
        failure: VeilbaseError = ConfigurationError(_CLOSED)
        try:
            with torch.no_grad(), planned_calls(self._model).on_course(LosesRows()):
                while (step := self._next_step()) is not None:
                    self._compute(step)
        except VerificationFailed as exc:
            failure = self._failure = copy.copy(exc)  # Without the traceback, whose frames hold rows and masks.
        except BaseException as exc:  # noqa: BLE001 - nobody may wait for ever for a thread that is gone
            failure = self._failure = VeilbaseError(f"the engine failed ({type(exc).__name__})")
        finally:
            with self._lock:
                self._is_closed = True
                left = [self._forget(number) for number in tuple(self._requests)]
            for request in left:
                request.fail(failure)
            self._slots.close()

    def _next_step(self) -> Step | None:
        """Waits until there are rows to compute, and returns the step; returns None when the engine is closed."""
        while True:
            self._woken.clear()  # The flag is cleared before the state is read, so that no change is missed.
            with self._lock:
                if self._is_closed:
                    return None
                ended = self._take_in()
                step = self._scheduler.plan(self._clock())
            for request, error in ended:
                if error is None:
                    request.cancel()
                else:
                    request.fail(error)
            if step.segments:
                return step
            if not ended:
                self._woken.wait()

    def _take_in(self) -> list[tuple[Request, VeilbaseError | None]]:
        """Gives new requests to the scheduler, and removes requests that are cancelled or whose adapter failed.

        Returns:
            The removed requests, each with the failure of its adapter, or None if it was cancelled.
        """
        for request, caller in self._fresh:
            kv_bytes = self._layout.bytes_for(request.num_tokens)
            self._scheduler.add(request.number, request.prompt.num_rows, kv_bytes, request, caller)
        self._fresh.clear()
        ended: list[tuple[Request, VeilbaseError | None]] = [
            (self._forget(number), None) for number in self._cancelled if number in self._requests
        ]
        self._cancelled.clear()
        for number in self._scheduler.waiting():
            failure = self._requests[number].ticket.failure
            if failure is not None:
                ended.append((self._forget(number), failure))
        return ended

    def _forget(self, number: int) -> Request:
        self._scheduler.remove(number)
        return self._requests.pop(number)

    def _compute(self, step: Step) -> None:
        """Computes a step with the model, and chooses the next token of each of its requests."""
        requests = [self._requests[segment.request] for segment in step.segments]
        try:
            results = self._runner.run(step, requests)
        except VerificationFailed:
            raise
        except VeilbaseError as exc:
            self._end_all(requests, exc)
            return
        except Exception as exc:  # noqa: BLE001 - torch raises many kinds; their texts may show values
            self._end_all(requests, VeilbaseError(f"a step of the engine failed ({type(exc).__name__})"))
            return
        self._scheduler.advance(step)
        for request, result in zip(requests, results, strict=True):
            if not result.is_finite and not request.is_lost:
                request.lose()
            if request.is_lost and not request.ending.fixed_length:
                self._end(request)
            elif result.logits is not None:
                self._take(request, result.logits)

    def _take(self, request: Request, logits: torch.Tensor) -> None:
        try:
            is_over = request.take(logits)
        except BaseException as exc:  # noqa: BLE001 - a hook of the user's may be native code that panics
            self._end(request, _of_the_users(exc))
        else:
            if is_over:
                self._end(request)
            else:
                with self._lock:
                    self._scheduler.append(request.number)

    def _end(self, request: Request, error: VeilbaseError | None = None) -> None:
        with self._lock:
            self._forget(request.number)
        if error is None:
            try:
                request.finish()
            except BaseException as exc:  # noqa: BLE001 - `on_text` got the rest of the text
                error = _of_the_users(exc)
        if error is not None:
            request.fail(error)

    def _end_all(self, requests: Iterable[Request], error: VeilbaseError) -> None:
        for request in requests:
            self._end(request, error)


def _of_the_users(exc: BaseException) -> VeilbaseError:
    """Returns the error of a request whose logits hook or `on_text` raised an exception. The error leaves out the
    exception's text, which may show values."""
    if isinstance(exc, VeilbaseError):
        return exc
    return VeilbaseError(f"on_text or a logits_processor of this request failed ({type(exc).__name__})")


def _stop_strings(given: str | Sequence[str]) -> tuple[str, ...]:
    """Returns stop strings as a tuple.

    Raises:
        ConfigurationError: a stop string is empty or is not a string.
    """
    stops = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise ConfigurationError("stop is a text or a list of texts, none of them empty")
    return stops
