"""This module turns the messages and tools of a chat request into a prompt.

If a trusted tokenizer's chat template mentions tools, it gets tools and tool calls as objects. Of several templates
with names, transformers takes `tool_use` if there are tools, and otherwise `default`. In all other cases tools are
described in a system message, and calls are written as text. This is always so with an unverified provider's template,
which sees no text (text/template.py).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tenant_sdk.endpoint.errors import bad_request
from tenant_sdk.endpoint.schema import Message, Tool
from tenant_sdk.text.ready import ReadyText
from tenant_sdk.text.source import surviving
from tenant_sdk.text.template import TemplateRefuses
from tenant_sdk.training.token_rows import RENDER_ERRORS

ChatPrompt = ReadyText | list[dict[str, str]]
_INTRODUCTION = (
    'You may call these functions. To call one, answer with <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call> '
    "and nothing else:\n"
)


class Prompts:
    """Makes prompts for one model."""

    def __init__(self, tokenizer: Any, is_trusted: bool) -> None:
        """Keeps the tokenizer's chat template.

        Args:
            tokenizer: a transformers tokenizer that no other code uses at the same time.
            is_trusted: whether the tokenizer's template may see the text of messages.
        """
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._template = getattr(tokenizer, "chat_template", None)
        self._is_trusted = is_trusted

    def of(self, messages: Sequence[Message], tools: Sequence[Tool]) -> ChatPrompt:
        """Returns the prompt for the engine. Callers must not call this in the event loop's thread, as templates may be
        slow.

        Raises:
            HttpError: the model has no chat template, or a message cannot be passed to the template.
            TemplateRefuses: the template refuses these messages.
        """
        if not self._template:
            raise bad_request("this model has no chat template: use /v1/completions", "messages")
        _check(messages)
        has_calls = any(message.tool_calls for message in messages)
        if self._is_trusted and (tools or has_calls) and self._takes_tools(bool(tools)):
            return self._rendered(messages, tools)
        return _plain(messages, tools)

    def _takes_tools(self, has_tools: bool) -> bool:
        """Returns whether the template of a request takes tools, or if the request has none, the calls of earlier
        ones."""
        template = self._template
        if isinstance(template, Mapping):
            chosen = "tool_use" if has_tools and "tool_use" in template else "default"
            template = template.get(chosen)
            return isinstance(template, str) and ("tools" if has_tools else "tool_calls") in template
        return isinstance(template, str) and "tools" in template

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Tool]) -> ReadyText:
        turns = [_full(message) for message in messages]
        described = [tool.model_dump(exclude_none=True) for tool in tools] or None
        try:
            with self._lock, surviving("the prompt", *RENDER_ERRORS):
                text = self._tokenizer.apply_chat_template(
                    turns, tools=described, add_generation_prompt=True, tokenize=False
                )
        except RENDER_ERRORS as exc:  # a template may raise nearly anything, with the prompt in the error text
            raise TemplateRefuses(
                f"the model's chat template does not take these messages and tools ({type(exc).__name__})"
            ) from None
        return ReadyText(str(text), with_special_tokens=False)


def _check(messages: Iterable[Message]) -> None:
    for number, message in enumerate(messages):
        place = f"messages.{number}"
        if message.tool_calls and message.role != "assistant":
            raise bad_request(f"{place}: only the assistant makes tool calls", place)
        if message.content is None and not message.tool_calls:
            raise bad_request(f"{place}: expected a content", place)
        if (message.role == "tool") != (message.tool_call_id is not None):
            raise bad_request(f"{place}: the role tool, and no other, has a tool_call_id", place)


def _full(message: Message) -> dict[str, Any]:
    """Returns a message for a template that supports tools; the arguments of its tool calls become objects."""
    turn: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
            for call in message.tool_calls
            for arguments in [_object(call.function.arguments)]
        ]
    return turn


def _object(text: str) -> Any:
    """Returns a call's arguments as an object if they are JSON; otherwise returns the text that the model wrote."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _plain(messages: Sequence[Message], tools: Sequence[Tool]) -> list[dict[str, str]]:
    """Returns messages that have only a role and a content. Tool calls are written into the content, and tools are
    described in a system message."""
    turns = [{"role": message.role, "content": _with_calls(message)} for message in messages]
    if not tools:
        return turns
    shown = "\n".join(json.dumps(_described(tool), ensure_ascii=False) for tool in tools)
    introduction = f"{_INTRODUCTION}{shown}"
    if turns[0]["role"] in ("system", "developer"):
        turns[0]["content"] += f"\n\n{introduction}"
        return turns
    return [{"role": "system", "content": introduction}, *turns]


def _described(tool: Tool) -> Mapping[str, Any]:
    return tool.function.model_dump(exclude_none=True, exclude={"strict"})


def _with_calls(message: Message) -> str:
    calls = [
        json.dumps({"name": call.function.name, "arguments": _object(call.function.arguments)}, ensure_ascii=False)
        for call in message.tool_calls or ()
    ]
    return "\n".join([*([message.text] if message.text else []), *(f"<tool_call>{call}</tool_call>" for call in calls)])
