"""This module handles requests to /v1/completions, which continue a text without a chat template."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from tenant_sdk.endpoint.errors import bad_request
from tenant_sdk.endpoint.http import Reply
from tenant_sdk.endpoint.logprobs import StreamedLogprobs, TextOffsets, completion_logprobs
from tenant_sdk.endpoint.options import LogprobRecord, engine_options, field_names
from tenant_sdk.endpoint.schema import MOST_CHOICES, CompletionRequest, parsed
from tenant_sdk.endpoint.service import Answering, Service, Submit, TextDelta, in_thread
from tenant_sdk.serving.requests import Answer
from tenant_sdk.text.ready import ReadyText, ReadyTokens


@dataclass
class _Prepared:
    """Holds a request that was checked, with one prompt or several."""

    request: CompletionRequest
    adapter: str | None
    prompts: list[ReadyText | ReadyTokens]
    records: list[LogprobRecord]
    began: float = field(default_factory=time.monotonic)
    id: str = field(default_factory=lambda: f"cmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns a response, or a chunk of a streamed response, without the token counts (`usage`)."""
        shared = {"id": self.id, "object": "text_completion", "created": self.created}
        return {**shared, "model": self.request.model, "choices": choices}


class Completions:
    """Handles requests for plain completions with an engine."""

    def __init__(self, service: Service) -> None:
        """Keeps the parts of the endpoint that the routes share."""
        self._service = service

    async def __call__(self, body: bytes) -> Reply:
        """Handles one request. Returns the response: one object, or a stream of chunks.

        Raises:
            HttpError: the request is refused.
            VeilbaseError: the engine refuses it, or fails.
        """
        prepared = await asyncio.get_running_loop().run_in_executor(None, self._prepare, body)
        if prepared.request.stream:
            return self._chunks(prepared)
        async with Answering() as answering:
            await answering.submit(self._submits(prepared))
            texts = await answering.texts()
            choices = await in_thread(
                lambda: [self._choice(prepared, *each) for each in zip(count(), texts, answering.answers, strict=False)]
            )
            return {**prepared.object(choices), "usage": self._usage(prepared, answering)}

    def _prepare(self, body: bytes) -> _Prepared:
        request = parsed(CompletionRequest, body)
        adapter = self._service.names.adapter_of(request.model)
        if request.logprobs is not None:
            self._service.released.check("logprobs")
        prompts = plain_prompts(request.prompt)
        num_choices = len(prompts) * request.n
        if num_choices > MOST_CHOICES:
            raise bad_request(f"a request has at most {MOST_CHOICES} choices, prompts times n", "n")
        num_records = 0 if request.logprobs is None else num_choices
        rounded = self._service.released.rounded_logprobs
        records = [LogprobRecord(request.logprobs or 0, rounded) for _ in range(num_records)]
        return _Prepared(request, adapter, prompts, records)

    def _submits(self, prepared: _Prepared) -> list[Submit]:
        submits: list[Submit] = []
        fields = field_names(prepared.request)
        for number, prompt in enumerate(prepared.prompts):
            for choice in range(prepared.request.n):
                index = number * prepared.request.n + choice
                hooks = [*prepared.records[index : index + 1]]
                options = engine_options(prepared.request, choice, hooks, self._service.vocab_size)
                submits.append(partial(self._service.submit, prompt, prepared.adapter, options, fields))
        return submits

    def _usage(self, prepared: _Prepared, answering: Answering) -> dict[str, int]:
        num_prompt = sum(answer.num_prompt_tokens for answer in answering.answers[:: prepared.request.n])
        num_new = answering.num_new_tokens
        self._service.metrics.count_answer(num_prompt, num_new, time.monotonic() - prepared.began)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}

    def _choice(self, prepared: _Prepared, index: int, text: str, answer: Answer) -> dict[str, Any]:
        logprobs = self._write(prepared.records[index], answer.token_ids) if prepared.records else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": _reason(answer)}

    def _write(
        self, record: LogprobRecord, token_ids: Sequence[int], start: int = 0, offsets: TextOffsets | None = None
    ) -> dict[str, Any]:
        service = self._service
        return completion_logprobs(record, token_ids, service.token_texts, service.released, start, offsets)

    async def _chunks(self, prepared: _Prepared) -> AsyncIterator[dict[str, Any]]:
        """Yields the chunks of a streamed response."""
        usage: dict[str, Any] = {"usage": None} if prepared.request.includes_usage else {}
        async with Answering() as answering:
            await answering.submit(self._submits(prepared))
            texts = self._service.token_texts
            logprobs = [
                StreamedLogprobs(partial(self._write, record, offsets=TextOffsets(texts)))
                for record in prepared.records
            ]
            async for event in answering.events():
                text, reason = (event.text, None) if isinstance(event, TextDelta) else ("", _reason(event.answer))
                choice = {"index": event.index, "text": text, "logprobs": None, "finish_reason": reason}
                if logprobs:
                    own, answer = logprobs[event.index], answering.answers[event.index]
                    wanted = partial(own.of, text) if reason is None else own.of_the_rest
                    choice["logprobs"] = await in_thread(partial(wanted, answer))
                yield {**prepared.object([choice]), **usage}
            counted = self._usage(prepared, answering)
        if usage:
            yield {**prepared.object([]), "usage": counted}


def _reason(answer: Answer) -> str:
    return "length" if answer.finish_reason == "length" else "stop"


def plain_prompts(given: str | Sequence[str] | Sequence[int] | Sequence[list[int]]) -> list[ReadyText | ReadyTokens]:
    """Returns the prompts that a field of a request holds: a text, token ids, or a list of either."""
    if isinstance(given, str):
        return [ReadyText(given)]
    if isinstance(given[0], int):
        return [ReadyTokens([each for each in given if isinstance(each, int)])]
    return [
        ReadyText(each) if isinstance(each, str) else ReadyTokens(each) for each in given if not isinstance(each, int)
    ]
