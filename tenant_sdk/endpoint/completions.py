"""This module handles requests to /v1/completions, which continue a text without a chat template. What chats do alike
is `TextRoute`, in service.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tenant_sdk.endpoint.errors import bad_request
from tenant_sdk.endpoint.logprobs import TextOffsets, completion_logprobs
from tenant_sdk.endpoint.options import LogprobRecord
from tenant_sdk.endpoint.schema import MOST_CHOICES, CompletionRequest
from tenant_sdk.endpoint.service import Asked, Choice, Service, TextRoute, finish_reason
from tenant_sdk.serving.requests import Answer
from tenant_sdk.text.ready import ReadyText, ReadyTokens


class Completions(TextRoute[CompletionRequest]):
    """Answers requests for plain completions with an engine."""

    request_kind = CompletionRequest
    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def read(self, request: CompletionRequest, adapter: str | None) -> Asked[CompletionRequest]:
        """Reads the prompts; see `TextRoute.read`."""
        prompts = plain_prompts(request.prompt)
        if len(prompts) * request.n > MOST_CHOICES:
            raise bad_request(f"a request has at most {MOST_CHOICES} choices, prompts times n", "n")
        return Asked(request, adapter, prompts, partial(CompletionChoice, self.service))


class CompletionChoice(Choice):
    """Writes one answer as a text, or as pieces of it."""

    def __init__(self, service: Service, index: int, record: LogprobRecord | None) -> None:
        """Begins a choice. Args: as for `Choice`."""
        super().__init__(service, index, record)
        self._offsets = TextOffsets(service.token_texts)

    def write_logprobs(self, record: LogprobRecord, token_ids: Sequence[int], start: int) -> dict[str, Any]:
        """Returns the field `logprobs`; see `Choice.write_logprobs`."""
        texts, released = self.service.token_texts, self.service.released
        return completion_logprobs(record, token_ids, texts, released, start, self._offsets)

    def whole(self, text: str, answer: Answer) -> dict[str, Any]:
        """Returns the choice of a response that is not streamed."""
        return self.made({"text": text}, self.all_logprobs(answer), finish_reason(answer))

    def delta(self, piece: str, answer: Answer) -> list[dict[str, Any]]:
        """Returns the chunk for a piece of text."""
        return [self.made({"text": piece}, self.logprobs_of(piece, answer))]

    def last(self, answer: Answer) -> list[dict[str, Any]]:
        """Returns the last chunk, which has no text and says why the answer ended."""
        return [self.made({"text": ""}, self.logprobs_of_the_rest(answer), finish_reason(answer))]


def plain_prompts(given: str | Sequence[str] | Sequence[int] | Sequence[list[int]]) -> list[ReadyText | ReadyTokens]:
    """Returns the prompts that a field of a request holds: a text, token ids, or a list of either."""
    if isinstance(given, str):
        return [ReadyText(given)]
    if isinstance(given[0], int):
        return [ReadyTokens([each for each in given if isinstance(each, int)])]
    return [
        ReadyText(each) if isinstance(each, str) else ReadyTokens(each) for each in given if not isinstance(each, int)
    ]
