"""This module handles requests to /v1/chat/completions, and reads the tool calls in the model's answers.

Tool calls are read in three forms: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen),
`[TOOL_CALLS] [{…}]` (Mistral), and a bare JSON object or list of such objects (Llama 3, which writes `parameters` for
`arguments`). While an answer is streamed, text that may be the beginning of a call is held back.

Guarantees: only tools that the request names are called. Whatever cannot be read as a call of such a tool is the
answer's text.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any
from urllib.parse import unquote

from tenant_sdk.endpoint.errors import bad_request, to_bytes
from tenant_sdk.endpoint.grammar import Grammar, GrammarHook
from tenant_sdk.endpoint.http import Reply
from tenant_sdk.endpoint.logprobs import StreamedLogprobs, chat_logprobs
from tenant_sdk.endpoint.options import LogprobRecord, engine_options, field_names
from tenant_sdk.endpoint.prompts import ChatPrompt
from tenant_sdk.endpoint.schema import MOST_TOOLS, ChatRequest, FunctionTool, NamedTool, Tool, parsed
from tenant_sdk.endpoint.service import Answering, Service, Submit, TextDelta, in_thread
from tenant_sdk.serving.requests import Answer

_TAG, _END_TAG = "<tool_call>", "</tool_call>"
_OPENERS = (_TAG, "[TOOL_CALLS]")
_BARE_OPENERS = ("{", "[")
_ONLY_DESCRIBE = {"type", "properties", "required", "title", "description", "$schema", "$id", "$comment", "$defs"}
"""The keywords beside which an empty `properties` says that there are no arguments."""
_MOST_REFERENCES = 8
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class Call:
    """Holds one call: the function's name, and its arguments as JSON."""

    name: str
    arguments: str

    def as_json(self, index: int | None = None) -> dict[str, Any]:
        """Returns the call as an object of OpenAI's interface, with a new random id. `index`, the number of the call,
        is added for streamed responses."""
        place = {} if index is None else {"index": index}
        function = {"name": self.name, "arguments": self.arguments}
        return {**place, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def active_tools(request: ChatRequest) -> list[Tool]:
    """Returns the tools that the model may call; an empty list if `tool_choice` is "none"."""
    if request.tool_choice == "none" or not request.tools:
        return []
    return list(request.tools)


def takes_object(tool: Tool) -> bool:
    """Returns whether the schema of a tool's arguments allows an object, as far as its `type` says so."""
    kinds = (tool.function.parameters or {}).get("type", "object")
    return "object" in (kinds if isinstance(kinds, list) else [kinds])


def forced_tools(request: ChatRequest, tools: Sequence[Tool]) -> list[tuple[str, dict[str, Any]]] | None:
    """Returns the tools of which the answer must call one, each with the schema of its arguments; None if the answer
    may be text."""
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return None
    wanted = choice.function.name if isinstance(choice, NamedTool) else None
    functions = [tool.function for tool in tools if wanted in (None, tool.function.name)]
    return [(function.name, _arguments_of(function)) for function in functions]


def _arguments_of(function: FunctionTool) -> dict[str, Any]:
    """Returns the schema of a function's arguments. As in OpenAI's interface, a function without `parameters`, or with
    an empty object of `properties`, has none; and the arguments are an object, whatever else the schema allows: a
    call with null is none."""
    given = function.parameters or {"type": "object", "properties": {}}
    if given.get("properties") == {} and not given.get("required") and given.keys() <= _ONLY_DESCRIBE:
        return {**given, "additionalProperties": False}
    return given if _refers_to_object(given) else {**given, "type": "object"}


def _refers_to_object(schema: dict[str, Any]) -> bool:
    """Returns whether a schema is a reference, within itself, to one of the type `object`. It stays as it is: beside
    `type`, a reference to a part that refers to the whole again could not be compiled."""
    target: Any = schema
    for _ in range(_MOST_REFERENCES):
        if not isinstance(target, dict) or "type" in target or not str(target.get("$ref", "")).startswith("#/"):
            break
        target = _at(schema, target["$ref"][2:].split("/"))
    return target is not schema and isinstance(target, dict) and target.get("type") == "object"


def _at(schema: Any, place: list[str]) -> Any:
    """Returns the part of a schema at a JSON pointer, or None."""
    for step in place:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def read_calls(text: str, names: Collection[str], most: int | None = None) -> tuple[str, list[Call]]:
    """Splits a complete answer, and returns its text outside the tool calls, and the calls.

    Args:
        text: the answer.
        names: the names of the tools that may be called.
        most: the number of calls that are returned, of those in the answer the first; None for all.
    """
    rest, calls = _read_calls(text, names)
    return rest, calls[:most]


def _read_calls(text: str, names: Collection[str]) -> tuple[str, list[Call]]:
    tagged = _tagged(text, names)
    if tagged is not None and tagged[1]:
        return tagged
    before, mark, rest = text.partition("[TOOL_CALLS]")
    calls = _calls_in(rest if mark else text, names)
    return (before.strip() if mark else "", calls) if calls else (text, [])


def _tagged(text: str, names: Collection[str]) -> tuple[str, list[Call]] | None:
    """Returns the text outside `<tool_call>` tags, and the calls in them; None if a tag holds something else.

    Each character is read once or twice, however many tags there are: reading ends at the first tag that is wrong.
    """
    outside: list[str] = []
    calls: list[Call] = []
    place = 0
    while (begin := text.find(_TAG, place)) >= 0:
        outside.append(text[place:begin])
        try:
            value, place = _DECODER.raw_decode(text, _after_space(text, begin + len(_TAG)))
        except (ValueError, RecursionError):
            return None
        call = _call_of(value, names)
        place = _after_space(text, place)
        is_closed = text.startswith(_END_TAG, place)
        if call is None or not (is_closed or place == len(text)):
            return None
        calls.append(call)
        place += len(_END_TAG) if is_closed else 0
    return "".join([*outside, text[place:]]).strip(), calls


def _after_space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return place if found is None else found.end()


def _calls_in(text: str, names: Collection[str]) -> list[Call]:
    """Returns the calls in a JSON text; an empty list if the text is anything else."""
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return []
    items = value if isinstance(value, list) else [value]
    if not 0 < len(items) <= MOST_TOOLS:
        return []
    calls = [_call_of(item, names) for item in items]
    return [call for call in calls if call is not None] if all(calls) else []


def _refuse(constant: str) -> None:
    """Refuses NaN and infinities, which Python's parser accepts although JSON does not have them."""
    raise ValueError


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _call_of(item: Any, names: Collection[str]) -> Call | None:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str) or item["name"] not in names:
        return None
    arguments = item.get("arguments", item.get("parameters", {}))
    if isinstance(arguments, str):
        return Call(item["name"], arguments)
    return Call(item["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


class HeldText:
    """Returns the text of a streamed answer up to the point at which a tool call may begin, and keeps the rest until
    the answer is complete. The time for a piece depends on the piece only, and not on the text before it."""

    def __init__(self, names: Collection[str], most: int | None = None) -> None:
        """Keeps the arguments of `read_calls`. If there are no tools, all text is returned at once."""
        self._names, self._most = names, most
        self._held: list[str] = []
        self._is_holding = False
        self._has_begun = False

    def put(self, piece: str) -> str:
        """Adds a piece of the answer, and returns the further text that cannot be part of a call."""
        if not self._names:
            return piece
        if self._is_holding or not (self._has_begun or piece.strip()):  # A bare call may follow the space.
            self._held.append(piece)
            return ""
        text = "".join([*self._held, piece])  # What was held is the space before the text, or part of an opener.
        stop = self._first_opener(text)
        self._has_begun, self._is_holding = True, stop is not None
        stop = _before_partial(text) if stop is None else stop
        self._held = [text[stop:]]
        return text[:stop]

    def end(self) -> tuple[str, list[Call]]:
        """Returns the rest of the text, and the tool calls. Callers must call this at the end of the answer."""
        rest = "".join(self._held)
        return read_calls(rest, self._names, self._most) if self._names else (rest, [])

    def _first_opener(self, text: str) -> int | None:
        if not self._has_begun and text.lstrip().startswith(_BARE_OPENERS):
            return 0
        places = [place for place in map(text.find, _OPENERS) if place >= 0]
        return min(places, default=None)


def _before_partial(text: str) -> int:
    """Returns the length of a text without an incomplete opener at its end, such as "<tool_c" of "<tool_call>"."""
    num_held = max(
        (size for opener in _OPENERS for size in range(1, len(opener)) if text.endswith(opener[:size])), default=0
    )
    return len(text) - num_held


@dataclass
class _Prepared:
    """Holds a request that was checked, and what its choices (its `n` answers) share."""

    request: ChatRequest
    adapter: str | None
    prompt: ChatPrompt
    tool_names: frozenset[str]
    records: list[LogprobRecord]
    make_grammar: Callable[[], Grammar] | None = None
    grammar: Grammar | None = None
    grammars: list[GrammarHook] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    def close(self) -> None:
        """Ends what the request holds beside its answers."""
        if self.grammar is not None:
            self.grammar.close()

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        """Returns one JSON object (a chunk) of a streamed response."""
        shared = {"id": self.id, "object": "chat.completion.chunk", "created": self.created}
        made = {**shared, "model": self.request.model, "choices": choices}
        return {**made, "usage": usage} if self.request.includes_usage else made


class Chat:
    """Answers chat requests with an engine."""

    def __init__(self, service: Service) -> None:
        """Keeps the parts of the endpoint that the routes share."""
        self._service = service

    async def __call__(self, body: bytes) -> Reply:
        """Handles one request. Returns the response: one object, or a stream of chunks.

        Raises:
            HttpError: the request is refused.
            VeilbaseError: the engine refuses it, or fails.
        """
        loop = asyncio.get_running_loop()
        prepared = await loop.run_in_executor(None, self.prepare, body)
        if prepared.make_grammar is not None:  # If the client goes away meanwhile, nobody holds the grammar: it ends.
            prepared.grammar = await loop.run_in_executor(self._service.grammar_threads, prepared.make_grammar)
        if prepared.request.stream:
            return self._chunks(prepared)
        with contextlib.closing(prepared):
            return await self._whole(prepared)

    async def _whole(self, prepared: _Prepared) -> dict[str, Any]:
        """Returns the response to a request that is not streamed."""
        async with Answering() as answering:
            await answering.submit(self._submits(prepared))
            texts = await answering.texts()
            choices = await in_thread(
                lambda: [self._choice(prepared, *each) for each in zip(count(), texts, answering.answers, strict=False)]
            )
            usage = self._usage(prepared, answering)
        return {
            "id": prepared.id, "object": "chat.completion", "created": prepared.created,
            "model": prepared.request.model, "choices": choices, "usage": usage, "system_fingerprint": None,
        }  # fmt: skip

    def prepare(self, body: bytes) -> _Prepared:
        request = parsed(ChatRequest, body)
        adapter = self._service.names.adapter_of(request.model)
        tools = active_tools(request)
        self._check(request, tools)
        prompt = self._service.prompts.of(request.messages, tools)
        rounded, num_records = self._service.released.rounded_logprobs, request.n if request.logprobs else 0
        records = [LogprobRecord(request.top_logprobs or 0, rounded) for _ in range(num_records)]
        kept, names = request.without_contents(), frozenset(tool.function.name for tool in tools)
        return _Prepared(kept, adapter, prompt, names, records, self._grammar(request, tools))

    def _grammar(self, request: ChatRequest, tools: list[Tool]) -> Callable[[], Grammar] | None:
        """Returns a function that makes the grammar of the request's answers; None if they may be any text."""
        forced, wanted = forced_tools(request, tools), request.response_format
        if forced is not None:
            return partial(self._service.grammars.of_call, forced, "tools")
        if wanted is None or wanted.type == "text":
            return None
        schema = None if wanted.json_schema is None else wanted.json_schema.schema_
        return partial(self._service.grammars.of_schema, schema, "response_format")

    def _check(self, request: ChatRequest, tools: list[Tool]) -> None:
        if request.logprobs:
            self._service.released.check("logprobs")
        elif request.top_logprobs is not None:
            raise bad_request("top_logprobs needs logprobs", "top_logprobs")
        names = [tool.function.name for tool in tools]
        if len(set(names)) < len(names):
            raise bad_request("two tools have one name", "tools")
        for number, tool in enumerate(tools):
            if not takes_object(tool):
                place = f"tools.{number}.function.parameters"
                raise bad_request(f"{place}: expected a schema of the type object", place)
        choice = request.tool_choice
        if choice not in (None, "none", "auto") and not tools:
            raise bad_request("tool_choice needs tools", "tool_choice")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise bad_request("tool_choice names none of the tools", "tool_choice")
        if len(to_bytes([tool.model_dump() for tool in tools])) > self._service.settings.limits.schema_bytes:
            raise bad_request(f"tools have at most {self._service.settings.limits.schema_bytes} bytes here", "tools")
        wanted = request.response_format
        if wanted is not None and (wanted.type == "json_schema") != (wanted.json_schema is not None):
            raise bad_request("the type json_schema, and no other, has a json_schema", "response_format")

    def _submits(self, prepared: _Prepared) -> list[Submit]:
        submits: list[Submit] = []
        fields = field_names(prepared.request)
        for index in range(prepared.request.n):
            hooks = [*prepared.records[index : index + 1]]
            options = engine_options(prepared.request, index, hooks, self._service.vocab_size)
            if prepared.grammar is not None:  # last, so that a bias cannot allow what the grammar forbids
                prepared.grammars.append(prepared.grammar.hook(raises=not prepared.request.fixed_length))
                options["logits_processor"].append(prepared.grammars[-1])
            submits.append(partial(self._service.submit, prepared.prompt, prepared.adapter, options, fields))
        return submits

    def _usage(self, prepared: _Prepared, answering: Answering) -> dict[str, int]:
        for grammar in prepared.grammars:
            grammar.check()
        num_prompt, num_new = answering.answers[0].num_prompt_tokens, answering.num_new_tokens
        self._service.metrics.count_answer(num_prompt, num_new, time.monotonic() - prepared.began)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}

    def _choice(self, prepared: _Prepared, index: int, text: str, answer: Answer) -> dict[str, Any]:
        rest, calls = (
            read_calls(text, prepared.tool_names, prepared.request.most_calls) if prepared.tool_names else (text, [])
        )
        message: dict[str, Any] = {"role": "assistant", "content": rest or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = [call.as_json() for call in calls]
        return {
            "index": index, "message": message, "logprobs": self._logprobs(prepared, index, answer),
            "finish_reason": _reason(answer, calls),
        }  # fmt: skip

    def _logprobs(self, prepared: _Prepared, index: int, answer: Answer) -> dict[str, Any] | None:
        if not prepared.records:
            return None
        return self._write(prepared.records[index], answer.token_ids)

    def _write(self, record: LogprobRecord, token_ids: Sequence[int], start: int = 0) -> dict[str, Any]:
        return chat_logprobs(record, token_ids, self._service.token_texts, self._service.released, start)

    async def _chunks(self, prepared: _Prepared) -> AsyncIterator[dict[str, Any]]:
        """Yields the chunks of a streamed response."""
        with contextlib.closing(prepared):
            async with Answering() as answering:
                await answering.submit(self._submits(prepared))
                held = [HeldText(prepared.tool_names, prepared.request.most_calls) for _ in answering.answers]
                logprobs = [StreamedLogprobs(partial(self._write, record)) for record in prepared.records]
                has_begun = [False] * len(held)
                async for event in answering.events():
                    if not has_begun[event.index]:
                        has_begun[event.index] = True
                        yield prepared.chunk([_delta(event.index, {"role": "assistant", "content": ""})])
                    if isinstance(event, TextDelta):
                        if text := held[event.index].put(event.text):
                            choice = _delta(event.index, {"content": text})
                            if logprobs:
                                answer = answering.answers[event.index]
                                choice["logprobs"] = await in_thread(partial(logprobs[event.index].of, text, answer))
                            yield prepared.chunk([choice])
                        continue
                    own = logprobs[event.index] if logprobs else None
                    for choice in await in_thread(partial(_last, event.index, event.answer, held[event.index], own)):
                        yield prepared.chunk([choice])
                usage = self._usage(prepared, answering)
            if prepared.request.includes_usage:
                yield prepared.chunk([], usage)


def _last(index: int, answer: Answer, held: HeldText, logprobs: StreamedLogprobs | None) -> list[dict[str, Any]]:
    """Returns the last chunks of one choice: text that was held back, tool calls, logprobs, and why it ended."""
    text, calls = held.end()
    deltas = [_delta(index, {"content": text})] if text else []
    if calls:
        deltas.append(_delta(index, {"tool_calls": [call.as_json(place) for place, call in enumerate(calls)]}))
    last = _delta(index, {}, _reason(answer, calls))
    if logprobs is not None:
        if deltas:  # All text that is left, since the text of calls is in no chunk as it was written.
            deltas[0]["logprobs"] = logprobs.of(answer.result(), answer)
        last["logprobs"] = logprobs.of_the_rest(answer)
    return [*deltas, last]


def _delta(index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _reason(answer: Answer, calls: list[Call]) -> str:
    if calls:
        return "tool_calls"
    return "length" if answer.finish_reason == "length" else "stop"
