"""This module says which tools a chat request may or must call, and reads the tool calls in the model's answers.

Tool calls are read in three forms: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen),
`[TOOL_CALLS] [{…}]` (Mistral), and a bare JSON object or list of such objects (Llama 3, which writes `parameters` for
`arguments`). While an answer is streamed, text that may be the beginning of a call is held back.

Guarantees: only tools that the request names are called. Whatever cannot be read as a call of such a tool is the
answer's text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from tenant_sdk.endpoint.errors import bad_request, to_bytes
from tenant_sdk.endpoint.schema import MOST_TOOLS, ChatRequest, FunctionTool, NamedTool, Tool

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


def check_tools(request: ChatRequest, tools: Sequence[Tool], most_bytes: int) -> None:
    """Checks the tools that a request names, against each other and against its `tool_choice`.

    Args:
        request: the request.
        tools: those that the model may call; see `active_tools`.
        most_bytes: the largest size of all tools together, as JSON.

    Raises:
        HttpError: the tools cannot be used.
    """
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise bad_request("two tools have one name", "tools")
    for number, tool in enumerate(tools):
        if not _takes_object(tool):
            place = f"tools.{number}.function.parameters"
            raise bad_request(f"{place}: expected a schema of the type object", place)
    choice = request.tool_choice
    if choice not in (None, "none", "auto") and not tools:
        raise bad_request("tool_choice needs tools", "tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise bad_request("tool_choice names none of the tools", "tool_choice")
    if len(to_bytes([tool.model_dump() for tool in tools])) > most_bytes:
        raise bad_request(f"tools have at most {most_bytes} bytes here", "tools")


def _takes_object(tool: Tool) -> bool:
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
