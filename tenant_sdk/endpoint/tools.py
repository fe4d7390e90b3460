"""This module reads the tool calls in a model's answer. While an answer is streamed, it holds back text that may be the
beginning of a call.

Three forms are read: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen), `[TOOL_CALLS] [{…}]`
(Mistral), and a bare JSON object or list of such objects (Llama 3, which writes `parameters` for `arguments`).
Guarantees: only tools that the request names are called. Whatever cannot be read as a call of such a tool is
the answer's text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tenant_sdk.endpoint.schema import MOST_TOOLS, ChatRequest, NamedTool, Tool

_TAGGED = re.compile(r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|$)", re.DOTALL)
_OPENERS = ("<tool_call>", "[TOOL_CALLS]")
_BARE_OPENERS = ("{", "[")


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


def forced_schema(request: ChatRequest, tools: Sequence[Tool]) -> dict[str, Any] | None:
    """Returns the JSON schema of an answer that must be a tool call; None if the answer may be text."""
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return None
    wanted = choice.function.name if isinstance(choice, NamedTool) else None
    forms = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
        if wanted in (None, tool.function.name)
    ]
    return forms[0] if len(forms) == 1 else {"anyOf": forms}


def read_calls(text: str, names: Collection[str]) -> tuple[str, list[Call]]:
    """Splits a complete answer, and returns its text outside the tool calls, and the calls.

    Args:
        text: the answer.
        names: the names of the tools that may be called.
    """
    tagged = _TAGGED.findall(text)
    if tagged:
        calls = [call for each in tagged for call in _calls_in(each, names)]
        return (_TAGGED.sub("", text).strip(), calls) if len(calls) == len(tagged) else (text, [])
    before, mark, rest = text.partition("[TOOL_CALLS]")
    calls = _calls_in(rest if mark else text, names)
    return (before.strip() if mark else "", calls) if calls else (text, [])


def _calls_in(text: str, names: Collection[str]) -> list[Call]:
    """Returns the calls in a JSON text; an empty list if the text is anything else."""
    try:
        value = json.loads(text, parse_constant=_refuse)
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


def _call_of(item: Any, names: Collection[str]) -> Call | None:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str) or item["name"] not in names:
        return None
    arguments = item.get("arguments", item.get("parameters", {}))
    if isinstance(arguments, str):
        return Call(item["name"], arguments)
    return Call(item["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


class HeldText:
    """Returns the text of a streamed answer up to the point at which a tool call may begin, and keeps the rest until
    the answer is complete."""

    def __init__(self, names: Collection[str]) -> None:
        """Keeps the names of the tools. If there are none, all text is returned at once."""
        self._names = names
        self._text = ""
        self._num_given = 0
        self._is_holding = False

    def put(self, piece: str) -> str:
        """Adds a piece of the answer, and returns the further text that cannot be part of a call."""
        self._text += piece
        if not self._names:
            return self._give(len(self._text))
        if self._is_holding:
            return ""
        stop = self._first_opener()
        self._is_holding = stop is not None
        return self._give(self._before_partial() if stop is None else stop)

    def end(self) -> tuple[str, list[Call]]:
        """Returns the rest of the text, and the tool calls. Callers must call this at the end of the answer."""
        rest = self._text[self._num_given :]
        return read_calls(rest, self._names) if self._names else (rest, [])

    def _give(self, stop: int) -> str:
        given = self._text[self._num_given : stop]
        self._num_given = max(stop, self._num_given)
        return given

    def _first_opener(self) -> int | None:
        if self._text.lstrip().startswith(_BARE_OPENERS):
            return 0
        places = [place for place in map(self._text.find, _OPENERS) if place >= 0]
        return min(places) if places else None

    def _before_partial(self) -> int:
        """Returns the length of the text without an incomplete opener at its end, such as "<tool_c" of
        "<tool_call>"."""
        if not self._text.strip():
            return 0
        num_held = max(
            (size for opener in _OPENERS for size in range(1, len(opener)) if self._text.endswith(opener[:size])),
            default=0,
        )
        return len(self._text) - num_held
