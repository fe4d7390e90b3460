"""This module handles requests to /v1/chat/completions: it makes a prompt of messages and tools, and writes answers and
their tool calls (tools.py) in OpenAI's form. What plain completions do alike is `TextRoute`, in service.py."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from tenant_sdk.endpoint.errors import bad_request
from tenant_sdk.endpoint.grammar import Grammar
from tenant_sdk.endpoint.logprobs import chat_logprobs
from tenant_sdk.endpoint.options import LogprobRecord
from tenant_sdk.endpoint.schema import ChatRequest, Tool
from tenant_sdk.endpoint.service import Asked, Choice, Service, TextRoute, finish_reason
from tenant_sdk.endpoint.tools import Call, HeldText, active_tools, check_tools, forced_tools, read_calls
from tenant_sdk.serving.requests import Answer


class Chat(TextRoute[ChatRequest]):
    """Answers chat requests with an engine."""

    request_kind = ChatRequest
    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    whole_only: ClassVar[Mapping[str, Any]] = {"system_fingerprint": None}

    def read(self, request: ChatRequest, adapter: str | None) -> Asked[ChatRequest]:
        """Makes the prompt, and chooses the grammar; see `TextRoute.read`."""
        tools = active_tools(request)
        self._check(request, tools)
        prompt = self.service.prompts.of(request.messages, tools)
        names = frozenset(tool.function.name for tool in tools)
        make_choice = partial(ChatChoice, names, request.most_calls, self.service)
        return Asked(
            request.without_contents(), adapter, [prompt], make_choice, make_grammar=self._grammar(request, tools)
        )

    def _check(self, request: ChatRequest, tools: list[Tool]) -> None:
        if request.top_logprobs is not None and not request.logprobs:
            raise bad_request("top_logprobs needs logprobs", "top_logprobs")
        check_tools(request, tools, self.service.settings.limits.schema_bytes)
        wanted = request.response_format
        if wanted is not None and (wanted.type == "json_schema") != (wanted.json_schema is not None):
            raise bad_request("the type json_schema, and no other, has a json_schema", "response_format")

    def _grammar(self, request: ChatRequest, tools: list[Tool]) -> Callable[[], Grammar] | None:
        """Returns a function that makes the grammar of the request's answers; None if they may be any text."""
        forced, wanted = forced_tools(request, tools), request.response_format
        if forced is not None:
            return partial(self.service.grammars.of_call, forced, "tools")
        if wanted is None or wanted.type == "text":
            return None
        schema = None if wanted.json_schema is None else wanted.json_schema.schema_
        return partial(self.service.grammars.of_schema, schema, "response_format")


class ChatChoice(Choice):
    """Writes one answer as a message, or as deltas of a message, in which tool calls are no text."""

    def __init__(
        self, tool_names: Collection[str], most_calls: int | None, service: Service, index: int,
        record: LogprobRecord | None,
    ) -> None:  # fmt: skip
        """Begins a choice. Args: tool_names, most_calls: as for `read_calls`; the others: as for `Choice`."""
        super().__init__(service, index, record)
        self._tool_names, self._most_calls = tool_names, most_calls
        self._held = HeldText(tool_names, most_calls)
        self._has_begun = False

    def write_logprobs(self, record: LogprobRecord, token_ids: Sequence[int], start: int) -> dict[str, Any]:
        """Returns the field `logprobs`; see `Choice.write_logprobs`."""
        return chat_logprobs(record, token_ids, self.service.token_texts, self.service.released, start)

    def whole(self, text: str, answer: Answer) -> dict[str, Any]:
        """Returns the choice of a response that is not streamed."""
        rest, calls = read_calls(text, self._tool_names, self._most_calls) if self._tool_names else (text, [])
        message: dict[str, Any] = {"role": "assistant", "content": rest or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = [call.as_json() for call in calls]
        return self.made({"message": message}, self.all_logprobs(answer), _reason(answer, calls))

    def delta(self, piece: str, answer: Answer) -> list[dict[str, Any]]:
        """Returns the chunks for a piece of text: none while the text may be a tool call."""
        begin, text = self._begin(), self._held.put(piece)
        return [*begin, self.made({"delta": {"content": text}}, self.logprobs_of(text, answer))] if text else begin

    def last(self, answer: Answer) -> list[dict[str, Any]]:
        """Returns the last chunks: text that was held back, tool calls, logprobs, and why the answer ended."""
        begin, (text, calls) = self._begin(), self._held.end()
        deltas = [self.made({"delta": {"content": text}})] if text else []
        if calls:
            written = [call.as_json(place) for place, call in enumerate(calls)]
            deltas.append(self.made({"delta": {"tool_calls": written}}))
        if deltas:  # All text that is left, since the text of calls is in no chunk as it was written.
            deltas[0]["logprobs"] = self.logprobs_of(answer.result(), answer)
        rest = self.logprobs_of_the_rest(answer)
        return [*begin, *deltas, self.made({"delta": {}}, rest, _reason(answer, calls))]

    def _begin(self) -> list[dict[str, Any]]:
        """Returns, the first time, the chunk with which a message begins."""
        has_begun, self._has_begun = self._has_begun, True
        return [] if has_begun else [self.made({"delta": {"role": "assistant", "content": ""}})]


def _reason(answer: Answer, calls: Sequence[Call]) -> str:
    return "tool_calls" if calls else finish_reason(answer)
