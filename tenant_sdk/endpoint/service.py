"""This module holds what the endpoint's routes share: the engine, the names of models, prompts, grammars, the rules for
the release of numbers, threads and counters.

`Answering` joins the answers of one HTTP request, which has several where n is above 1, into one stream of events for
asyncio. `Metrics` counts what the endpoint does, for `/metrics` in Prometheus' text format. `Service` holds the objects
that all routes use.

Guarantees: if a request ends before an answer is complete, that answer is cancelled. A request ends early if its client
left, or if one of its answers failed. Names and labels of metrics are fixed words and statuses. No model name, key or
text of a request becomes a label.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import math
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from noise.masks.off import READABLE
from tenant_sdk.endpoint.errors import HttpError, bad_request
from tenant_sdk.endpoint.grammar import Grammars
from tenant_sdk.endpoint.logprobs import TokenTexts
from tenant_sdk.endpoint.models import ModelNames
from tenant_sdk.endpoint.privacy import Released
from tenant_sdk.endpoint.prompts import Prompts
from tenant_sdk.endpoint.settings import EndpointSettings
from tenant_sdk.plain_values import WrongOption
from tenant_sdk.serving.engine import Engine
from tenant_sdk.serving.requests import Answer
from tenant_sdk.session_protocol import TextSession
from tenant_sdk.text.ready import ReadyText, ReadyTokens
from tenant_sdk.text.rows import CutWarning
from tenant_sdk.warn import warn_and_go_on
from wire.errors import AccessError, QuotaExceeded, VeilbaseError, VerificationFailed, code_of

Submit = Callable[[Callable[[str], None]], Answer]
"""A function that asks the engine for one answer. Its argument is a function that gets each piece of text."""
T = TypeVar("T")
_log = logging.getLogger("veilbase.endpoint")


async def in_thread(work: Callable[[], T]) -> T:
    """Runs a function in another thread and returns its result, so that the event loop can serve other requests.

    An example is writing the logprobs of a long answer, which takes seconds.
    """
    return await asyncio.get_running_loop().run_in_executor(None, work)


@dataclass(frozen=True)
class TextDelta:
    """Holds a piece of the text of one choice (one of the `n` answers to a request)."""

    index: int
    text: str


@dataclass(frozen=True)
class End:
    """Says that one choice is complete."""

    index: int
    answer: Answer


class Answering:
    """Holds the answers of one request. As an asynchronous context manager it cancels incomplete answers at its end."""

    def __init__(self) -> None:
        """Makes an object without answers. Callers must call it in the event loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[TextDelta | End] = asyncio.Queue()
        self._lock = threading.Lock()
        self._is_over = False
        self.answers: list[Answer] = []

    async def submit(self, submits: Sequence[Submit]) -> None:
        """Asks the engine for all answers. This runs in another thread, since it tokenizes prompts and reads files.

        Raises:
            HttpError: a prompt is larger than the model's context.
            VeilbaseError: the engine refused one of them.
        """
        await asyncio.get_running_loop().run_in_executor(None, self._submit_all, submits)

    def _submit_all(self, submits: Sequence[Submit]) -> None:
        for index, submit in enumerate(submits):
            answer = submit(self._piece_of(index))
            with self._lock:
                self.answers.append(answer)
                is_over = self._is_over
            if is_over:  # the client left meanwhile
                answer.cancel()
                return
            answer.add_done_callback(self._end_of(index))

    def _piece_of(self, index: int) -> Callable[[str], None]:
        return lambda text: self._put(TextDelta(index, text))

    def _end_of(self, index: int) -> Callable[[Answer], None]:
        return lambda answer: self._put(End(index, answer))

    def _put(self, event: TextDelta | End) -> None:
        """Hands an event to the event loop; called in the engine's thread."""
        if not self._is_over:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def events(self) -> AsyncIterator[TextDelta | End]:
        """Yields the pieces and ends of all answers as they come.

        Raises:
            VeilbaseError: an answer failed.
        """
        num_left = len(self.answers)
        while num_left:
            event = await self._events.get()
            if isinstance(event, End):
                if event.answer.error is not None:
                    event.answer.result()  # raises a copy of the error
                num_left -= 1
            yield event

    async def texts(self) -> list[str]:
        """Waits for all answers and returns their texts. Raises: see `events`."""
        texts = [""] * len(self.answers)
        async for event in self.events():
            if isinstance(event, TextDelta):
                texts[event.index] += event.text
        return texts

    @property
    def num_prompt_tokens(self) -> int:
        """Returns the number of prompt tokens, without padding. A prompt counts once for each of its answers."""
        return sum(answer.num_prompt_tokens for answer in self.answers)

    @property
    def num_new_tokens(self) -> int:
        """Returns the number of tokens of all answers so far."""
        return sum(len(answer.token_ids) for answer in self.answers)

    async def __aenter__(self) -> Answering:
        """Returns this object."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancels the answers that are not complete, so that other requests can run."""
        with self._lock:
            self._is_over = True
            answers = list(self.answers)
        for answer in answers:
            answer.cancel()


CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_WEIGHT = 0.2
"""The weight of the newest request in the moving average of how long requests take."""
_MOST_BUSY_S = 60.0


class Metrics:
    """Holds the counters of one endpoint."""

    def __init__(self, gauges: Callable[[], Mapping[str, float]]) -> None:
        """Makes counters that start at 0.

        Args:
            gauges: a function that returns the present value of each gauge, by name.
        """
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "veilbase_endpoint_requests", "Requests.", ("route", "status"), registry=self._registry
        )  # fmt: skip
        self._seconds = Histogram(
            "veilbase_endpoint_request_seconds", "Seconds from the first byte of a request to the end of its answer.",
            ("route",), buckets=_SECONDS, registry=self._registry,
        )  # fmt: skip
        self._tokens = Counter(
            "veilbase_endpoint_tokens", "Tokens of prompts and of answers.", ("kind",), registry=self._registry
        )
        self._registry.register(_Gauges(gauges))
        self._lock = threading.Lock()
        self._mean_s = 1.0

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """Counts one request; a status of 0 stands for a client that left before the response."""
        self._requests.labels(route, str(status or "gone")).inc()
        self._seconds.labels(route).observe(seconds)

    def count_answer(self, num_prompt: int, num_new: int, seconds: float) -> None:
        """Counts the tokens of one request and its answers, and records how long the request took."""
        self._tokens.labels("prompt").inc(num_prompt)
        self._tokens.labels("answer").inc(num_new)
        with self._lock:
            self._mean_s += _WEIGHT * (seconds - self._mean_s)

    def busy_s(self) -> float:
        """Returns the seconds after which a full engine is expected to take another request: a moving average of how
        long requests took, but at least 1 and at most 60."""
        with self._lock:
            return min(_MOST_BUSY_S, max(1.0, self._mean_s))

    def text(self) -> bytes:
        """Returns all metrics as text."""
        return generate_latest(self._registry)


class _Gauges(Collector):
    """Reads the values of the gauges each time Prometheus collects them."""

    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._read = read

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Yields one gauge for each name."""
        for name, value in self._read().items():
            yield GaugeMetricFamily(f"veilbase_endpoint_{name}", f"Present {name.replace('_', ' ')}.", value)

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Returns an empty list, so that no gauge is read when this collector is registered."""
        return ()


_LOG_AGAIN_S = 60.0
"""The seconds in which the log has at most one line about refusals with the same reason."""
_SLOW_THREADS, _UPLOAD_THREADS, _GRAMMAR_THREADS = 4, 2, 2
_FULL_RETRY_S = 5.0


class Threads(ThreadPoolExecutor):
    """Runs work in threads, as asyncio's executor, and tells whether work is stuck in them."""

    def __init__(
        self, name: str, stuck_s: float, num_threads: int | None = None, most_waiting: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Makes the threads.

        Args:
            name: what the threads work on, for the names of threads and for `/health`.
            stuck_s: the seconds after which work that has not ended counts as stuck, from when it was given.
            num_threads: the most threads; None takes Python's default.
            most_waiting: the most work that waits for a thread; None sets no limit.
            clock: returns the present time in seconds.
        """
        super().__init__(num_threads, thread_name_prefix=f"veilbase-{name}")
        self.name, self._stuck_s, self._clock = name, stuck_s, clock
        self._most = None if num_threads is None or most_waiting is None else num_threads + most_waiting
        self._lock = threading.Lock()
        self._began: dict[object, float] = {}

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """Gives work to the threads.

        Raises:
            HttpError: too much work waits.
        """
        key = object()
        with self._lock:
            if self._most is not None and len(self._began) >= self._most:
                text = f"{self._most} {self.name} are being worked on or wait for it, the most here: try again"
                raise HttpError(429, text, f"too_many_{self.name}", None, _FULL_RETRY_S)
            self._began[key] = self._clock()
        try:
            future = super().submit(work, *arguments, **named)
        except BaseException:
            self._forget(key)
            raise
        future.add_done_callback(lambda _: self._forget(key))
        return future

    def _forget(self, key: object) -> None:
        with self._lock:
            self._began.pop(key, None)

    @property
    def num_given(self) -> int:
        """Returns how much work runs or waits."""
        with self._lock:
            return len(self._began)

    @property
    def is_stuck(self) -> bool:
        """Returns whether the oldest work was given more than `stuck_s` seconds ago."""
        with self._lock:
            return bool(self._began) and self._clock() - min(self._began.values()) > self._stuck_s


class Service:
    """Holds the parts of one endpoint."""

    def __init__(
        self, client: TextSession, engine: Engine, names: ModelNames, released: Released, settings: EndpointSettings,
        privacy: str, on_end: Callable[[VeilbaseError], None],
    ) -> None:  # fmt: skip
        """Keeps the parts.

        Args:
            client: the tenant's session.
            engine: an engine over this session.
            names: the names of models.
            released: which numbers may be released.
            privacy: the privacy in force, a line for each subject.
            settings: where the endpoint listens, and its limits.
            on_end: called once, in any thread, with the error after which this endpoint cannot handle requests any
                more.
        """
        text = client.text
        self.engine, self.names, self.released, self.settings = engine, names, released, settings
        self.privacy = privacy
        self.vocab_size = len(text.tokenizer)
        self._context, self._is_padded = client.context_length, client.bucket is not None
        self._most_characters = self._context * max(map(len, text.tokenizer.get_vocab()), default=1)
        self.prompts = Prompts(copy.deepcopy(text.tokenizer), is_trusted=text.origin != "provider")
        self.grammars = Grammars(copy.deepcopy(text.tokenizer), text.stop_ids, settings.limits)
        limits = settings.limits
        self.threads = Threads("requests", limits.stuck_s)
        """Does the work on requests that must not hold the event loop: the loop's default executor."""
        self.grammar_threads = Threads("schemas", limits.stuck_s, _GRAMMAR_THREADS, limits.schemas_waiting)
        """Waits for schemas to be compiled, so that other requests do not wait for hostile ones."""
        self.slow_threads = Threads("files", limits.stalled_s, _SLOW_THREADS)
        """Does work that may take seconds for one request, such as reading a file or waiting for an adapter."""
        self.upload_threads = Threads("uploads", limits.stalled_s, _UPLOAD_THREADS)
        """Checks uploaded files, so that a question about a job does not wait for large ones."""
        self.token_texts = TokenTexts(copy.deepcopy(text.tokenizer))
        self.metrics = Metrics(self._gauges)
        self.ended_by: VeilbaseError | None = None
        self.refused_as: str | None = None
        """The code with which the provider refused the requests of this tenant last, such as `not_permitted`; None if
        it answers them."""
        self._is_logged = False
        self._logged_at: dict[str, float] = {}
        self.count_jobs: Callable[[], Mapping[str, float]] = dict
        """Returns the numbers of jobs and of their steps, for the metrics."""
        self._on_end = on_end
        self.clock: Callable[[], float] = time.monotonic
        """Returns the present time in seconds, for the log of refusals."""

    def submit(
        self, prompt: Any, adapter: str | None, options: Mapping[str, Any], fields: Mapping[str, str], on_text: Any
    ) -> Answer:
        """Asks the engine for one answer.

        Args:
            prompt, adapter, options, on_text: arguments of `Engine.submit`.
            fields: the client's names of the engine's options, where these have another name there.

        Raises:
            HttpError: an option cannot be used, and the error names the client's field; or the prompt is larger than
                the model's context, and prompts are not padded.
            VeilbaseError: the engine refused the request, or the endpoint has ended.
        """
        if self.ended_by is not None:
            raise copy.copy(self.ended_by)
        prompt = self._of_possible_size(prompt, fields["prompt"])
        try:
            answer = self.engine.submit(prompt, adapter, on_text=on_text, **options)
        except WrongOption as exc:
            name = fields.get(exc.option, exc.option)
            text = str(exc) if exc.option == "prompt" else str(exc).replace(exc.option, name)
            raise bad_request(text, name) from None
        except VeilbaseError as exc:
            self.note(exc, is_engine=type(exc) is VeilbaseError)
            raise
        answer.add_done_callback(self._note_answer)
        return answer

    def _note_answer(self, answer: Answer) -> None:
        if answer.error is not None:
            self._note_refusal(answer.error)
        elif self.refused_as is not None and (answer.token_ids or answer.mean_hidden is not None):
            self.refused_as = None
            if self._is_logged:
                _log.warning("the provider answers this tenant again")

    def _note_refusal(self, error: VeilbaseError) -> None:
        """Notes the error with which an answer ended: the end of the endpoint, as `note` does, or that the provider
        refuses this tenant. The log gets one line about it, until the provider answers or has another reason; and at
        most one a minute for each reason."""
        self.note(error)
        if not _is_refusal(error):
            return
        code = code_of(error).name.lower()
        if code != self.refused_as:
            self.refused_as, self._is_logged = code, False
        if not self._is_logged:
            self._is_logged = self._log_refusal("this tenant", code, error)

    def note_job(self, error: VeilbaseError) -> None:
        """Notes the error with which a job ended, as that of an answer. A refusal is logged as well, and does not
        change `refused_as`: a tenant may be permitted to ask and not to train, and the job itself says why it failed.
        """
        self.note(error)
        if _is_refusal(error):
            self._log_refusal("a job of this tenant", code_of(error).name.lower(), error)

    def _log_refusal(self, whom: str, code: str, error: VeilbaseError) -> bool:
        """Logs a refusal, unless the log has a line of this kind from the last minute. Returns whether it did."""
        line, now = f"the provider refuses {whom} ({code})", self.clock()
        if now - self._logged_at.get(line, -math.inf) < _LOG_AGAIN_S:
            return False
        self._logged_at[line] = now
        _log.error("%s: %s", line, error)
        return True

    def _of_possible_size(self, prompt: Any, field: str) -> Any:
        """Returns a prompt that is not so large that its tokenizer would take seconds for it while other requests wait.

        With padded prompts (`pad_rows`) a larger one loses its beginning, as every prompt longer than the bucket does:
        the provider would see a refusal. The tokens that the bucket keeps are the same.

        Raises:
            HttpError: the prompt cannot fit into the model's context, and prompts are not padded.
        """
        if isinstance(prompt, ReadyTokens):
            size, most, unit = len(prompt.token_ids), self._context, "tokens"
        else:
            texts = [prompt.text] if isinstance(prompt, ReadyText) else [turn["content"] for turn in prompt]
            size, most, unit = sum(map(len, texts)), self._most_characters, "characters"
        if size <= most:
            return prompt
        if not self._is_padded:
            beyond = "" if unit == "tokens" else f", however few tokens they make (it takes {self._context})"
            raise bad_request(
                f"the prompt has {size} {unit}, and this model can take {most} at most{beyond}: shorten the prompt",
                field,
            )
        warn_and_go_on(f"a prompt has {size} {unit}: its beginning is left out before it is tokenized", CutWarning)
        return _last_part(prompt, most)

    def note(self, error: VeilbaseError | None, is_engine: bool = False) -> None:
        """Ends the endpoint for good if the error is a reply that failed its check, or (`is_engine`) the end of the
        engine."""
        if self.ended_by is None and error is not None and (is_engine or isinstance(error, VerificationFailed)):
            self.ended_by = copy.copy(error)
            self._on_end(self.ended_by)

    def health(self) -> dict[str, Any]:
        """Returns what `/health` answers: the status `ok`, `ended` after an error that cannot be recovered from, or
        `stuck` with a list of what takes too long (`EndpointLimits.stuck_s` and `stalled_s`). While the provider
        refuses this tenant's requests, it also has the code of the reason; the status is that of this process, since no
        restart of it would help. It waits for nothing."""
        if self.ended_by is not None:
            return {"status": "ended"}
        provider = {} if self.refused_as is None else {"provider": "refuses", "reason": self.refused_as}
        pools = self.threads, self.grammar_threads, self.slow_threads, self.upload_threads
        stuck = [each.name for each in pools if each.is_stuck]
        if self.engine.step_s() > self.settings.limits.stalled_s:
            stuck.append("engine")
        return {"status": "stuck", "stuck": stuck, **provider} if stuck else {"status": "ok", **provider}

    def close(self) -> None:
        """Ends the processes that compile schemas."""
        self.grammar_threads.shutdown(wait=False, cancel_futures=True)
        self.grammars.close()

    def status(self) -> dict[str, Any]:
        """Returns what the web page shows: the numbers of running and waiting requests, each adapter with its tier, the
        privacy in force, and a warning if the mask hides nothing."""
        engine, tiers = self.engine.status(), self.names.tiers()
        privacy = [re.split(" {2,}", line, maxsplit=1) for line in self.privacy.splitlines() if "  " in line]
        readable = next((text for name, text in privacy if name == READABLE), None)
        return {
            "running": engine.num_running,
            "waiting": engine.num_waiting,
            "adapters": None if tiers is None else [{"name": name, "tier": tier} for name, tier in tiers],
            "privacy": privacy,
            "warning": None if readable is None else f"{READABLE}: {readable}",
        }

    def _gauges(self) -> dict[str, float]:
        status = self.engine.status()
        return {
            "requests_running": status.num_running,
            "requests_waiting": status.num_waiting,
            "kv_reserved_bytes": status.reserved_bytes,
            "requests_preempted": status.num_preemptions,
            "is_serving": 1.0 if self.ended_by is None else 0.0,
            "is_refused": 0.0 if self.refused_as is None else 1.0,
            "is_stuck": 1.0 if self.health()["status"] == "stuck" else 0.0,
            "schemas_compiling": self.grammar_threads.num_given,
            "schemas_held": self.grammars.num_held,
            **self.names.load_counts(),
            **self.count_jobs(),
        }


def _is_refusal(error: VeilbaseError) -> bool:
    """Returns whether the provider refuses this tenant. A quota is none: it passes by itself."""
    return isinstance(error, AccessError) and not isinstance(error, QuotaExceeded)


def _last_part(prompt: Any, most: int) -> Any:
    """Returns a prompt with its last `most` tokens or characters. All messages stay, the first ones perhaps empty."""
    if isinstance(prompt, ReadyTokens):
        return ReadyTokens(prompt.token_ids[-most:])
    if isinstance(prompt, ReadyText):
        return replace(prompt, text=prompt.text[-most:])
    turns: list[dict[str, str]] = []
    for turn in reversed(prompt):
        begin = max(0, len(turn["content"]) - most)
        turns.append({**turn, "content": turn["content"][begin:]})
        most -= len(turns[-1]["content"])
    return turns[::-1]
