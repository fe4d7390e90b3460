"""Tests the real model over HTTP: characters that consist of several tokens arrive whole, and answers follow a schema
or call a tool as asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tenant_sdk import TenantClient
from tests.support.endpoints import endpoint_of, official

pytestmark = [pytest.mark.real_model, pytest.mark.slow]
SHAPE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "population": {"type": "integer"}},
    "required": ["city", "population"],
    "additionalProperties": False,
}
WEATHER = {"city": SHAPE["properties"]["city"]}  # type: ignore[index]
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {**SHAPE, "properties": WEATHER, "required": ["city"]}},
}


@pytest.fixture(scope="module")
def ai(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    cache = tmp_path_factory.mktemp("real") / "cache"
    given = TenantClient("inproc:smollm2-135m", mask="off", verify="smollm2-135m", cache=cache, progress=False)
    with given as client, endpoint_of(client) as endpoint:
        yield official(endpoint)


def asked(ai: openai.OpenAI, text: str, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return ai.chat.completions.create(model="smollm2-135m", messages=messages, temperature=0, **options)


def test_characters_of_several_tokens_come_whole(ai: openai.OpenAI) -> None:
    chunks = asked(ai, "Name the capital of France. Answer with emoji 🗼.", max_tokens=16, stream=True)
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert pieces
    assert "\ufffd" not in "".join(pieces)
    assert any(ord(letter) > 0xFFFF for letter in "".join(pieces))


def test_a_schema_and_a_tool(ai: openai.OpenAI) -> None:
    shape: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SHAPE}}
    answer = asked(ai, "Describe Paris as JSON with city and population.", max_tokens=80, response_format=shape)
    assert answer.choices[0].finish_reason == "stop"
    value = json.loads(answer.choices[0].message.content)
    assert (set(value), type(value["population"])) == ({"city", "population"}, int)
    answer = asked(ai, "What is the weather in Paris?", max_tokens=60, tools=[TOOL], tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Paris"})
