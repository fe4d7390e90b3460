"""This module holds what the endpoint's routes share: the engine, the names of models, prompts, grammars, the rules for
the release of numbers, threads and counters.

`Answering` joins the answers of one HTTP request, which has several where n is above 1, into one stream of events for
asyncio. `TextRoute` is what chats and plain completions have in common, from the body of a request to the response,
streamed or not; prompts and the form of a choice are all that chat.py and completions.py decide. `Metrics` counts what
the endpoint does, for `/metrics` in Prometheus' text format. `Service` holds the objects that all routes use.

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
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from noise.masks.off import READABLE
from tenant_sdk.endpoint.errors import HttpError, bad_request
from tenant_sdk.endpoint.grammar import Grammar, GrammarHook, Grammars
from tenant_sdk.endpoint.logprobs import StreamedLogprobs, TokenTexts
from tenant_sdk.endpoint.models import ModelNames
from tenant_sdk.endpoint.options import LogprobRecord, engine_options, field_names
from tenant_sdk.endpoint.privacy import Released
from tenant_sdk.endpoint.prompts import Prompts
from tenant_sdk.endpoint.schema import ChatRequest, CompletionRequest, parsed
from tenant_sdk.endpoint.settings import EndpointSettings
from tenant_sdk.plain_values import WrongOption
from tenant_sdk.serving.engine import Engine
from tenant_sdk.serving.requests import Answer
from tenant_sdk.session_protocol import TextSession
from tenant_sdk.text.ready import ReadyText, ReadyTokens
from tenant_sdk.text.rows import CutWarning
from tenant_sdk.warn import warn_and_go_on
from wire.errors import AccessError, QuotaExceeded, VeilbaseError, VerificationFailed, code_of

if TYPE_CHECKING:
    from tenant_sdk.endpoint.http import Reply

Submit = Callable[[Callable[[str], None]], Answer]
"""A function that asks the engine for one answer. Its argument is a function that gets each piece of text."""
T = TypeVar("T")
R = TypeVar("R", bound=ChatRequest | CompletionRequest)
_log = logging.getLogger("veilbase.endpoint")


async def in_thread(work: Callable[..., T], *arguments: Any, threads: Threads | None = None) -> T:
    """Runs a function in another thread and returns its result, so that the event loop can serve other requests.

    Args:
        work, arguments: the function, and its arguments.
        threads: the threads; None means `Service.threads`.
    """
    return await asyncio.get_running_loop().run_in_executor(threads, work, *arguments)


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
        await in_thread(self._submit_all, submits)

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
    def num_new_tokens(self) -> int:
        """Returns the number of tokens of all answers so far."""
        return sum(len(answer.token_ids) for answer in self.answers)

    async def __aenter__(self) -> Answering:
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


class Choice(ABC):
    """Writes one choice of a response, which is one answer of the engine, in the form of its route: either whole or,
    where the response is streamed, piece by piece."""

    def __init__(self, service: Service, index: int, record: LogprobRecord | None) -> None:
        """Begins a choice.

        Args:
            service: the parts of the endpoint.
            index: the number of the choice in the response.
            record: the logprobs of its tokens; None if the request asks for none.
        """
        self.service, self._index, self._record = service, index, record
        self._logprobs = None if record is None else StreamedLogprobs(partial(self.write_logprobs, record))

    def all_logprobs(self, answer: Answer) -> dict[str, Any] | None:
        """Returns the field `logprobs` of a whole choice."""
        return None if self._record is None else self.write_logprobs(self._record, answer.token_ids, 0)

    def logprobs_of(self, text: str, answer: Answer) -> dict[str, Any] | None:
        """Returns the field `logprobs` of the next chunk, which has the text `text`."""
        return None if self._logprobs is None else self._logprobs.of(text, answer)

    def logprobs_of_the_rest(self, answer: Answer) -> dict[str, Any] | None:
        """Returns the field `logprobs` of the last chunk."""
        return None if self._logprobs is None else self._logprobs.of_the_rest(answer)

    def made(
        self, content: Mapping[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
    ) -> dict[str, Any]:  # fmt: skip
        """Returns a choice with the field of its route, which is all of `content`."""
        return {"index": self._index, **content, "logprobs": logprobs, "finish_reason": reason}

    @abstractmethod
    def write_logprobs(self, record: LogprobRecord, token_ids: Sequence[int], start: int) -> dict[str, Any]:
        """Returns the field `logprobs` for the first tokens of an answer, from the index `start` on."""

    @abstractmethod
    def whole(self, text: str, answer: Answer) -> dict[str, Any]:
        """Returns the choice of a response that is not streamed. `answer` is complete, and `text` is its text."""

    @abstractmethod
    def delta(self, piece: str, answer: Answer) -> list[dict[str, Any]]:
        """Returns the choices of the next chunks, one for each chunk, for a further piece of the text."""

    @abstractmethod
    def last(self, answer: Answer) -> list[dict[str, Any]]:
        """Returns the choices of the last chunks. `answer` is complete."""


def finish_reason(answer: Answer) -> str:
    """Returns why the text of a complete answer ended, in OpenAI's words."""
    return "length" if answer.finish_reason == "length" else "stop"


@dataclass
class Asked(Generic[R]):
    """Holds a request for text that was checked, and what its choices share.

    Attributes:
        request: the request.
        adapter: the adapter's name in the store; None for the base model.
        prompts: the prompts, as `Engine.submit` takes them. Each has `request.n` choices.
        make_choice: makes the writer of a choice, of its index and the record of its logprobs.
        records: the record of each choice's logprobs; empty if the request asks for none.
        make_grammar: makes the grammar that the answers must fit; None if they may be any text.
        grammar: the grammar, once it was made.
        grammars: the grammar's hook of each choice.
        began: when the request was read, for the metrics.
        created: the same in seconds since 1970, for the response.
    """

    request: R
    adapter: str | None
    prompts: Sequence[Any]
    make_choice: Callable[[int, LogprobRecord | None], Choice]
    records: list[LogprobRecord] = field(default_factory=list)
    make_grammar: Callable[[], Grammar] | None = None
    grammar: Grammar | None = None
    grammars: list[GrammarHook] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))

    def choices(self) -> list[Choice]:
        """Returns new writers of all choices, in order."""
        records = {index: record for index, record in enumerate(self.records)}
        return [self.make_choice(index, records.get(index)) for index in range(self.num_choices)]

    @property
    def num_choices(self) -> int:
        """Returns the number of choices, which is the number of answers that the engine is asked for."""
        return len(self.prompts) * self.request.n

    def close(self) -> None:
        """Ends what the request holds beside its answers."""
        if self.grammar is not None:
            self.grammar.close()


class TextRoute(ABC, Generic[R]):
    """Handles the requests of one route that answers with text: chats, or plain completions."""

    request_kind: type[R]
    """What a body is read as."""
    id_prefix: ClassVar[str]
    """What ids of responses begin with."""
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    """The `object` of a response that is not streamed, and of a chunk of one that is."""
    whole_only: ClassVar[Mapping[str, Any]] = {}
    """Further fields of a response that is not streamed."""

    def __init__(self, service: Service) -> None:
        """Keeps the parts of the endpoint that the routes share."""
        self.service = service

    @abstractmethod
    def read(self, request: R, adapter: str | None) -> Asked[R]:
        """Checks what is this route's own in a request, and makes the prompts. It is called in a thread.

        Args:
            request: the request, whose types and limits are right.
            adapter: the adapter that it names.

        Raises:
            HttpError: the request is refused.
        """

    async def __call__(self, body: bytes) -> Reply:
        """Handles one request. Returns the response: one object, or a stream of chunks.

        Raises:
            HttpError: the request is refused.
            VeilbaseError: the engine refuses it, or fails.
        """
        asked = await in_thread(self.prepare, body)
        if asked.make_grammar is not None:  # If the client goes away meanwhile, nobody holds the grammar: it ends.
            asked.grammar = await in_thread(asked.make_grammar, threads=self.service.grammar_threads)
        return self._chunks(asked) if asked.request.stream else await self._whole(asked)

    def prepare(self, body: bytes) -> Asked[R]:
        """Reads and checks a request. Raises: see `read`."""
        request = parsed(self.request_kind, body)
        adapter = self.service.names.adapter_of(request.model)
        num_top = request.num_top_logprobs
        if num_top is not None:
            self.service.released.check("logprobs")
        asked = self.read(request, adapter)
        if num_top is not None:
            rounded = self.service.released.rounded_logprobs
            asked.records = [LogprobRecord(num_top, rounded) for _ in range(asked.num_choices)]
        return asked

    async def _whole(self, asked: Asked[R]) -> dict[str, Any]:
        """Returns the response to a request that is not streamed."""
        with contextlib.closing(asked):
            async with Answering() as answering:
                await answering.submit(self._submits(asked))
                texts = await answering.texts()
                written = zip(asked.choices(), texts, answering.answers, strict=True)
                choices = await in_thread(lambda: [choice.whole(text, answer) for choice, text, answer in written])
                usage = self._usage(asked, answering)
        return {**self._object(asked, self._new_id(), self.whole_object, choices), "usage": usage, **self.whole_only}

    async def _chunks(self, asked: Asked[R]) -> AsyncIterator[dict[str, Any]]:
        """Yields the chunks of a streamed response."""
        made = partial(self._object, asked, self._new_id(), self.chunk_object)
        no_usage: dict[str, Any] = {"usage": None} if asked.request.includes_usage else {}
        with contextlib.closing(asked):
            async with Answering() as answering:
                await answering.submit(self._submits(asked))
                choices = asked.choices()
                async for event in answering.events():
                    for choice in await self._written(asked, choices[event.index], event, answering):
                        yield {**made([choice]), **no_usage}
                usage = self._usage(asked, answering)
            if asked.request.includes_usage:
                yield {**made([]), "usage": usage}

    async def _written(
        self, asked: Asked[R], choice: Choice, event: TextDelta | End, answering: Answering
    ) -> list[dict[str, Any]]:  # fmt: skip
        """Returns the choices of the chunks for one event. What may take long is written in a thread: logprobs, and
        the end of an answer, which may be a long tool call."""
        if isinstance(event, End):
            return await in_thread(choice.last, event.answer)
        piece = event.text, answering.answers[event.index]
        return await in_thread(choice.delta, *piece) if asked.records else choice.delta(*piece)

    def _submits(self, asked: Asked[R]) -> list[Submit]:
        submits: list[Submit] = []
        fields = field_names(asked.request)
        for prompt in asked.prompts:
            for number in range(asked.request.n):
                index = len(submits)
                hooks = asked.records[index : index + 1]
                options = engine_options(asked.request, number, hooks, self.service.vocab_size)
                if asked.grammar is not None:  # last, so that a bias cannot allow what the grammar forbids
                    asked.grammars.append(asked.grammar.hook(raises=not asked.request.fixed_length))
                    options["logits_processor"].append(asked.grammars[-1])
                submits.append(partial(self.service.submit, prompt, asked.adapter, options, fields))
        return submits

    def _usage(self, asked: Asked[R], answering: Answering) -> dict[str, int]:
        """Counts the tokens of complete answers. A prompt counts once, whatever the number of its choices.

        Raises:
            VeilbaseError: the grammar of an answer failed in the middle of it.
        """
        for grammar in asked.grammars:
            grammar.check()
        num_prompt = sum(answer.num_prompt_tokens for answer in answering.answers[:: asked.request.n])
        num_new = answering.num_new_tokens
        self.service.metrics.count_answer(num_prompt, num_new, time.monotonic() - asked.began)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}

    def _new_id(self) -> str:
        return f"{self.id_prefix}-{secrets.token_hex(12)}"

    def _object(self, asked: Asked[R], id_: str, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns a response, or a chunk of one, without the token counts (`usage`)."""
        return {"id": id_, "object": name, "created": asked.created, "model": asked.request.model, "choices": choices}


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
