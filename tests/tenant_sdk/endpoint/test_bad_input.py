"""Tests that every invalid request gets an error in OpenAI's format with a fitting status, and one line in the log, and
that no request causes a status 500."""

from __future__ import annotations

import copy
import json
import logging
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pydantic
import pytest

from tenant_sdk import TenantClient
from tenant_sdk.endpoint.app import App
from tenant_sdk.endpoint.chat import Chat
from tenant_sdk.endpoint.errors import HttpError
from tenant_sdk.endpoint.jobs import JobRequest
from tenant_sdk.endpoint.schema import (
    CalledFunction,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    FunctionTool,
    LoadAdapter,
    Message,
    ResponseFormat,
    SchemaFormat,
    StreamOptions,
    TextPart,
    Tool,
    ToolCall,
    UnloadAdapter,
    parsed,
)
from tenant_sdk.endpoint.server import Endpoint
from tenant_sdk.endpoint.settings import EndpointSettings
from tests.support.endpoints import WHO, chat, endpoint_of, raw
from tests.support.saved_adapters import save_adapter
from tests.support.waiting import SLOW_TIMEOUT_S, until

USER = {"role": "user", "content": "who?"}
CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
PLAIN = {"model": "llama", "prompt": "who?", "max_tokens": 2, "temperature": 0}
SMALLEST: dict[type[pydantic.BaseModel], dict[str, Any]] = {
    ChatRequest: {"model": "llama", "messages": [USER]}, CompletionRequest: {"model": "llama", "prompt": "a"},
    EmbeddingRequest: {"model": "llama", "input": "a"}, JobRequest: {"model": "llama", "training_file": "file-1"},
    LoadAdapter: {"lora_name": "a"}, UnloadAdapter: {"lora_name": "a"},
}  # fmt: skip
"""The smallest body of every route that takes JSON."""
CHAT: list[tuple[dict[str, Any], str | None]] = [
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 1.5}, "n"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"seed": 1 << 70}, "seed"),
    ({"seed": True}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"messages": []}, "messages"),
    ({"messages": "who?"}, "messages"),
    ({"messages": [{}]}, "messages.0.role"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0"),
    ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages.0"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
    ({"messages": [{**USER, "tool_call_id": "x"}]}, "messages.0"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
        "response_format",
    ),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"logit_bias": {"x": 1.0}}, "logit_bias"),
    ({"logit_bias": {"5": 101.0}}, "logit_bias"),
    ({"logit_bias": {"100000": 1.0}}, "logit_bias"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"messages": [{**USER, "function_call": {"name": "f"}}]}, "messages.0.function_call"),
    ({"messages": [{**USER, "content": 5}]}, "messages.0.content"),
    ({"messages": [{**USER, "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    ({"messages": [{**USER, "content": [{"type": "text", "text": None}]}]}, "messages.0.content.0.text"),
    ({"stop": 5}, "stop"),
    ({"stop": ["x", 5]}, "stop.1"),
    ({"tool_choice": "always"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}}, "tool_choice.function"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ({"metadata": {"x" * 65: ""}}, "metadata"),
    ({"metadata": {"x": "y" * 513}}, "metadata.x"),
    ({"metadata": {"x": None}}, "metadata.x"),
    ({"model": ""}, "model"),
    ({"model": None}, "model"),
    ({"store": True}, "store"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT, ids=lambda each: str(each)[:60])
def test_a_wrong_field_is_named(endpoint: Endpoint, fields: dict[str, Any], param: str | None) -> None:
    with raw(endpoint) as http:
        answer = http.post("/v1/chat/completions", json=chat(**fields))
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["param"] == param or (param is not None and error["param"].startswith(param + "."))
        assert set(error) == {"message", "type", "param", "code"}
        assert "\n" not in error["message"]
        assert len(error["message"]) < 500


@pytest.mark.parametrize(
    ("kind", "fields", "param", "text"),
    [
        (
            ChatRequest,
            {"messages": [{**USER, "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}]},
            "messages.0.content.0.cache_control",
            "messages.0.content.0.cache_control is not supported here: leave it out",
        ),
        (
            ChatRequest, {"messages": [{**USER, "content": [{"type": "text", "text": 5}]}]},
            "messages.0.content.0.text", "messages.0.content.0.text: Input should be a valid string",
        ),
        (
            ChatRequest, {"messages": [{**USER, "content": {}}]},
            "messages.0.content", "messages.0.content: expected a text or a list of text parts",
        ),
        (
            ChatRequest, {"tool_choice": {"type": "function", "function": {"name": "f"}, "x": 1}},
            "tool_choice.x", "tool_choice.x is not supported here: leave it out",
        ),
        (ChatRequest, {"who is it?": 1}, None,
         "a field of the body, whose name is not shown, is not supported here: leave it out"),
        (CompletionRequest, {"prompt": [1, "a"]}, "prompt.1", "prompt.1: Input should be a valid integer"),
        (CompletionRequest, {"prompt": ["a", 1]}, "prompt.1", "prompt.1: Input should be a valid string"),
        (CompletionRequest, {"prompt": {}}, "prompt", "prompt: expected a text, token ids, or a list of either"),
        (CompletionRequest, {"suffix": "x"}, "suffix", "suffix is not supported here: leave it out"),
        (EmbeddingRequest, {"input": [[1], [1.5]]}, "input.1.0", None),
        (EmbeddingRequest, {"dimensions": 5}, "dimensions", "dimensions is not supported here: leave it out"),
        (JobRequest, {"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs", None),
        (JobRequest, {"hyperparameters": {"n_epochs": []}}, "hyperparameters.n_epochs",
         "hyperparameters.n_epochs: expected auto or a number"),
        (JobRequest, {"validation_file": "file-1"}, "validation_file",
         "validation_file is not supported here: leave it out"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_place_and_the_true_reason(
    kind: type[pydantic.BaseModel], fields: dict[str, Any], param: str | None, text: str | None
) -> None:
    with pytest.raises(HttpError) as refused:
        parsed(kind, json.dumps({**SMALLEST[kind], **fields}).encode())
    assert refused.value.param == param
    assert text is None or refused.value.text == text


@pytest.mark.parametrize(
    ("kind", "fields", "text"),
    [
        (ChatRequest, {"temprature": 1}, "temprature is not supported here: did you mean temperature?"),
        (ChatRequest, {"modle": "x"}, "modle is not supported here: did you mean model?"),
        (ChatRequest, {"maxTokens": 5}, "maxTokens is not supported here: did you mean max_tokens?"),
        (ChatRequest, {"max_new_tokens": 5}, "max_new_tokens is not supported here: did you mean max_tokens?"),
        (ChatRequest, {"messages": [{**USER, "contnet": "x"}]},
         "messages.0.contnet is not supported here: did you mean content?"),
        (ChatRequest, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "shema": {"a": 1}}}},
         "response_format.json_schema.shema is not supported here: did you mean schema?"),
        (ChatRequest, {"stream_options": {"included_usage": True}},
         "stream_options.included_usage is not supported here: did you mean include_usage?"),
        (ChatRequest, {"tool_choice": {"type": "function", "function": {"name": "f", "nam": "f"}}},
         "tool_choice.function.nam is not supported here: did you mean name?"),
        (CompletionRequest, {"best_off": 1}, "best_off is not supported here: did you mean best_of?"),
        (EmbeddingRequest, {"inputs": "a"}, "inputs is not supported here: did you mean input?"),
        (JobRequest, {"method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epoch": 3}}}},
         "method.supervised.hyperparameters.n_epoch is not supported here: did you mean n_epochs?"),
        (ChatRequest, {"reasoning_effort": "low"}, "reasoning_effort is not supported here: leave it out"),
        (ChatRequest, {"min_tokens": 5}, "min_tokens is not supported here: leave it out"),
    ],
)  # fmt: skip
def test_a_misspelt_field_has_the_nearest_name_beside_it(
    kind: type[pydantic.BaseModel], fields: dict[str, Any], text: str
) -> None:
    with pytest.raises(HttpError) as refused:
        parsed(kind, json.dumps({**SMALLEST[kind], **fields}).encode())
    assert refused.value.text == text
    assert (refused.value.code, refused.value.param) == ("unknown_field", text.split(" ")[0])


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"modle": "llama", "messages": [USER]}, "modle is not supported here: did you mean model?"),
        ({"model": "llama", "mesages": [USER]}, "mesages is not supported here: did you mean messages?"),
        ({"model": "llama", "messages": [{"rol": "user"}]}, "messages.0.rol is not supported here: did you mean role?"),
        ({"messages": [USER]}, "model: this field is required"),
        ({"messages": [USER], "temprature": 1}, "model: this field is required"),
        ({"model": "llama", "messages": []}, "messages: expected at least 1 entry, got 0"),
        ({"model": "llama", "messages": [USER], "stop": ["a"] * 17}, "stop: expected at most 16 entries, got 17"),
    ],
)
def test_a_missing_or_misspelt_required_field_and_a_wrong_number_are_told(body: dict[str, Any], text: str) -> None:
    with pytest.raises(HttpError) as refused:
        parsed(ChatRequest, json.dumps(body).encode())
    assert refused.value.text == text


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/Completions/", "/v1/completions"),
        ("/v1/model", "/v1/models"),
        ("/v1/owls/of/the/north", None),
        ("/" + "v1" * 5000, None),
    ],
)
def test_an_unknown_path_has_the_nearest_one_beside_it(path: str, meant: str | None) -> None:
    text = App(MagicMock(settings=EndpointSettings(key="x"))).no_such_path(path).text
    assert text == "there is no such path here" + ("" if meant is None else f": did you mean {meant}?")


LONG = [{"role": "user", "content": "who is it? " * 40}]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"max_tokens": 1 << 20}, "max_tokens"),
        ("chat/completions", {"max_completion_tokens": 1 << 20}, "max_completion_tokens"),
        ("chat/completions", {"max_completion_tokens": 1 << 20, "max_tokens": 5}, "max_completion_tokens"),
        ("chat/completions", {"messages": LONG * 20}, "messages"),
        ("completions", {"prompt": "who?", "max_tokens": 1 << 20}, "max_tokens"),
        ("completions", {"prompt": [1, 2, 1 << 20]}, "prompt"),
        ("completions", {"prompt": [1] * 5000}, "prompt"),
        ("embeddings", {"input": [1, 2, 1 << 20]}, "input"),
        ("embeddings", {"input": [[1] * 5000]}, "input"),
    ],
)
def test_what_the_engine_refuses_has_the_clients_name(
    endpoint: Endpoint, path: str, fields: dict[str, Any], param: str
) -> None:
    body = chat(**fields) if path.startswith("chat") else {"model": chat()["model"], **fields}
    if "max_completion_tokens" in fields and "max_tokens" not in fields:
        body.pop("max_tokens", None)
    with raw(endpoint) as http:
        answer = http.post(f"/v1/{path}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "invalid_value")
    assert "max_new_tokens" not in error["message"]
    assert "tokens" not in param or param in error["message"]


def test_a_field_of_an_unknown_name_shows_none_of_it_when_it_may_be_a_text() -> None:
    for name in ("my secret text", "\u00e9", "x" * 65, "(list)"):
        with pytest.raises(HttpError) as refused:
            parsed(ChatRequest, json.dumps({**SMALLEST[ChatRequest], name: 1}).encode())
        assert name not in refused.value.text


# ---- what counts as absent -------------------------------------------------------------------------------------------


def same_with_null(kind: type[pydantic.BaseModel], given: dict[str, Any]) -> None:
    """Checks for every optional field of a kind of object that null says what its absence says."""
    for name, field in kind.model_fields.items():
        key = field.alias or name
        if not field.is_required():
            without = {other: value for other, value in given.items() if other != key}
            body = json.dumps({**without, key: None}).encode()
            assert parsed(kind, body) == parsed(kind, json.dumps(without).encode()), key


@pytest.mark.parametrize("kind", SMALLEST, ids=lambda kind: kind.__name__)
def test_null_is_the_same_as_absent_in_every_field_of_every_route(kind: type[pydantic.BaseModel]) -> None:
    same_with_null(kind, SMALLEST[kind])
    given = json.dumps(SMALLEST[kind]).encode()
    for unknown in (None, "", [], {}):
        body = json.dumps({**SMALLEST[kind], "reasoning_effort": unknown, "\u00e9 x": unknown}).encode()
        assert parsed(kind, body) == parsed(kind, given)
    kept = parsed(kind, json.dumps({**SMALLEST[kind], "prompt_cache_key": "x", "metadata": {"a": "b"}}).encode())
    assert kept.model_copy(update={"prompt_cache_key": None, "metadata": None}) == parsed(kind, given)


def test_null_is_the_same_as_absent_inside_of_messages_tools_and_formats() -> None:
    call = {"id": "c1", "function": {"name": "f"}}
    given: list[tuple[type[pydantic.BaseModel], dict[str, Any]]] = [
        (Message, {"role": "assistant", "tool_calls": [call]}), (Message, USER), (ToolCall, call), (Tool, TOOL),
        (CalledFunction, {"name": "f"}), (FunctionTool, {"name": "f"}), (SchemaFormat, {"name": "x"}),
        (StreamOptions, {}), (TextPart, {"type": "text", "text": "a"}), (ResponseFormat, {"type": "text"}),
    ]  # fmt: skip
    for kind, smallest in given:
        same_with_null(kind, smallest)
        body = json.dumps({**smallest, "cache_control": None, "index": [], "audio": {}, "refusal": ""}).encode()
        assert parsed(kind, body) == parsed(kind, json.dumps(smallest).encode())


def test_a_call_without_arguments_has_an_empty_object() -> None:
    for arguments in ("", " ", None):
        assert CalledFunction(**{"name": "f", "arguments": arguments}).arguments == "{}"


def test_null_is_answered_in_every_route(endpoint: Endpoint) -> None:
    nulls = {"n": None, "stream": None, "fixed_length": None, "audio": {}, "functions": [], "prompt_cache_key": "x"}
    called = {**CALL, "function": {"name": "f", "arguments": ""}, "index": None}
    turns = [*WHO, {"role": "assistant", "content": None, "tool_calls": [called]}]
    turns.append({"role": "tool", "tool_call_id": "x", "content": "5"})
    full = json.loads(json.dumps(turns).replace('"arguments": ""', '"arguments": "{}"'))
    with raw(endpoint) as http:
        for path, body, other in (
            ("chat/completions", chat(**nulls, messages=turns), chat(messages=full)),
            ("completions", {**PLAIN, **nulls, "suffix": ""}, PLAIN),
            ("embeddings", {**SMALLEST[EmbeddingRequest], "encoding_format": None, "dimensions": None},
             SMALLEST[EmbeddingRequest]),
        ):  # fmt: skip
            given, expected = http.post(f"/v1/{path}", json=body), http.post(f"/v1/{path}", json=other)
            assert given.status_code == 200, given.text
            shared = {"id": None, "created": None}
            assert {**given.json(), **shared} == {**expected.json(), **shared}


# ---- what is no request ----------------------------------------------------------------------------------------------


def test_what_a_waiting_request_keeps_has_no_messages_tools_or_schemas(endpoint: Endpoint) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    body = chat(tools=[TOOL], tool_choice="none", response_format=shape, metadata={"a": "b"})
    kept = Chat(endpoint.service).prepare(json.dumps(body).encode()).request
    assert (kept.messages, kept.tools, kept.response_format, kept.metadata) == ([], None, None, None)
    assert kept.max_tokens == 4


def test_parts_of_a_message_are_kept_as_one_text() -> None:
    parts = [{"type": "text", "text": "a"}] * 256
    assert Message(**{"role": "user", "content": parts}).content == "a" * 256


EMPTY = ("[]", '{"":0}')


@pytest.fixture(scope="module")
def peaks() -> dict[str, list[str]]:
    """Returns, for each of EMPTY, the field that a body of a million of them is refused for, and the kilobytes that
    reading it takes. Each body is read in a child of one process, since to import the reader takes longer than that."""
    code = f"""
import os, resource
from tenant_sdk.endpoint.schema import ChatRequest, HttpError, parsed
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for value in {EMPTY!r}:
    child = os.fork()
    if not child:
        body = b'{{"model": [' + (value.encode() + b",") * ((4 << 20) // (len(value) + 1)) + b"0]}}"
        before = peak()
        try: parsed(ChatRequest, body)
        except HttpError as exc: print(value, exc.param, peak() - before, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
    return {value: found for value, *found in map(str.split, told.splitlines())}


@pytest.mark.parametrize("value", EMPTY)
def test_a_body_of_a_million_empty_objects_takes_less_than_150_megabytes(
    value: str, peaks: dict[str, list[str]]
) -> None:
    """The old reading took up to 485 MB for 4 MiB."""
    field, kilobytes = peaks[value]
    assert field == "model"
    assert 0 < int(kilobytes) < 150_000


def test_a_completion_of_token_ids_that_are_none(endpoint: Endpoint, client: TenantClient) -> None:
    most = len(client.tokenizer)
    with raw(endpoint) as http:
        for prompt in ([most], [-1], [[1], [most + 5]], [True], [], [[]], {}, None, ["a"] * 17, ""):
            answer = http.post("/v1/completions", json={"model": "llama", "prompt": prompt, "max_tokens": 2})
            assert answer.status_code == 400, prompt
        assert http.post("/v1/completions", json={"model": "llama", "prompt": "a", "echo": True}).status_code == 400


@pytest.mark.parametrize(
    "model", ["nobody", "https://example.com/adapter", "../llama", "/etc/passwd", "llama/", "LLAMA"]
)
def test_an_unknown_model(endpoint: Endpoint, model: str) -> None:
    with raw(endpoint) as http:
        answer = http.post("/v1/chat/completions", json=chat(model=model))
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_an_unknown_model_names_the_nearest_one(endpoint: Endpoint) -> None:
    with raw(endpoint) as http:
        told = http.post("/v1/chat/completions", json=chat(model="lama")).json()["error"]["message"]
        assert told == "there is no model 'lama' here: the nearest is llama"
        told = http.post("/v1/unload_lora_adapter", json={"lora_name": "qqq"}).json()["error"]["message"]
        assert told.startswith("there is no model 'qqq' here: there are llama")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b"nan", b"[]", b"9" * 10_000, b"[" * 100_000, b'{"model": NaN}', b"null"]
)
def test_what_is_no_json_object(endpoint: Endpoint, body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> list[str]:  # other loggers may write too, and the line of an earlier test's call may come late
        said = [record.getMessage() for record in caplog.records if record.name == "veilbase.endpoint"]
        return [line for line in said if line.startswith("POST /v1/chat/completions")]

    with caplog.at_level(logging.INFO, "veilbase.endpoint"), raw(endpoint) as http:
        answer = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] in ("invalid_json", "invalid_value")
        until(lines, "the line in the log, which comes after the answer")
    assert len(lines()) == 1
    assert lines()[0].startswith("POST /v1/chat/completions 400 invalid_")


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have(endpoint: Endpoint, number: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": "?"}}}]
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"maximum": "?"}}}
    with raw(endpoint) as http:
        for fields in ({"tools": tools}, {"tools": tools, "tool_choice": "required"}, {"response_format": wanted}):
            body = json.dumps(chat(**fields)).replace('"?"', number)
            headers = {"content-type": "application/json"}
            answer = http.post("/v1/chat/completions", content=body, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
            assert "finite" in answer.json()["error"]["message"]


def test_settings_that_are_nearly_0(endpoint: Endpoint) -> None:
    with raw(endpoint) as http:
        body = {**chat(), "logit_bias": {"5": 100}}
        likeliest = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        for temperature in (1e-6, 1e-300, 5e-324):
            answer = http.post("/v1/chat/completions", json={**body, "temperature": temperature})
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["message"] == likeliest
        for field in ("temperature", "top_p"):
            assert http.post("/v1/chat/completions", json={**body, field: 1e-5}).status_code == 200
        answer = http.post("/v1/chat/completions", json={**body, "repetition_penalty": 1e-300})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "repetition_penalty")


@pytest.mark.parametrize("ids", [b"[true,", b"[[true,", b"[[],", b"[1,[],", b"[-1,[1],"])
def test_reading_ends_at_the_first_wrong_token_id(ids: bytes) -> None:
    body = b'{"model": "llama", "prompt": %s%s}' % (ids, b"true," * 800_000 + b"1" + b"]" * ids.count(b"["))
    for kind, data in ((CompletionRequest, body), (EmbeddingRequest, body.replace(b"prompt", b"input"))):
        with pytest.raises(pydantic.ValidationError) as refused:
            kind.model_validate_json(data)
        assert refused.value.error_count() < 20


@pytest.mark.parametrize("field", ["", "metadata", "logit_bias", "response_format"])
def test_a_million_faults_are_not_described(field: str) -> None:
    faults = b",".join(b'"%x": [1]' % number for number in range(300_000))
    inner = b'"%s": {%s}' % (field.encode(), faults) if field else faults
    body = b'{"model": "llama", "messages": [], %s}' % inner
    with pytest.raises(HttpError) as refused:
        parsed(ChatRequest, body)
    assert (refused.value.status, refused.value.text) == (400, "more than 1000 fields or values of the body are wrong")


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer takes seconds for megabytes, while other requests wait for it."""
    monkeypatch.setattr(endpoint.engine, "submit", None)
    text, ids = "x" * 2_000_000, [1] * 1_000_000
    with raw(endpoint) as http:
        for path, body in (
            ("chat/completions", chat(messages=[{"role": "user", "content": text}])),
            ("completions", {"model": "llama", "prompt": text}), ("completions", {"model": "llama", "prompt": ids}),
            ("embeddings", {"model": "llama", "input": [text]}), ("embeddings", {"model": "llama", "input": ids}),
        ):  # fmt: skip
            answer = http.post(f"/v1/{path}", json=body)
            assert answer.status_code == 400
            assert "shorten the prompt" in answer.json()["error"]["message"]


def test_a_huge_schema_is_refused_at_once(endpoint: Endpoint) -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep, "b": deep}}
        if len(json.dumps(deep)) > 100_000:
            break
    wide = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(3000)}}
    nested = {"type": "string", "pattern": "((((a{1,200}){1,200}){1,200}){1,200}){1,200}"}
    with raw(endpoint) as http:
        for schema in (deep, wide, nested):
            shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            answer = http.post("/v1/chat/completions", json=chat(response_format=shape))
            if schema is nested:  # llguidance unfolds a pattern only as far as an answer goes
                assert answer.status_code in (200, 400)
                continue
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] in ("schema_too_large", "bad_schema", "invalid_value")
        assert http.post("/v1/chat/completions", json=chat()).status_code == 200


def content_type(path: str) -> str:
    return "multipart/form-data; boundary=x" if path == "/v1/files" else "application/json"


# ---- damaged requests -----------------------------------------------------------------------------------------------

PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    "/v1/models", "/v1/status", "/v1/fine_tuning/jobs?limit=5&after=x", "/v1/fine_tuning/jobs?limit=-1&limit",
    "/v1/models/support", "/v1/fine_tuning/jobs", "/v1/fine_tuning/jobs/x/events", "/v1/files", "/v1/files/x",
    "/metrics", "/health", "/", "/v1/nothing", "/v1/models/%2e%2e%2fx", "/v1//chat", "/%00",
)  # fmt: skip
METHODS = ("POST",) * 8 + ("GET", "PUT", "DELETE", "HEAD", "PATCH", "OPTIONS")
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}
HONEST_REQUESTS: list[dict[str, Any]] = [
    {
        "model": "llama", "messages": WHO, "max_tokens": 3, "n": 1, "stream": False, "stop": ["x"], "seed": 1,
        "temperature": 0.5, "top_p": 0.9, "logit_bias": {"5": 1.0}, "frequency_penalty": 0.1, "logprobs": True,
        "top_logprobs": 2, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": _SCHEMA}},
        "tools": [_TOOL], "tool_choice": "auto", "stream_options": {"include_usage": True}, "fixed_length": False,
        "max_completion_tokens": 3,
    },
    {"model": "support", "prompt": "who?", "max_tokens": 3, "n": 2, "stream": True, "logprobs": 1, "stop": "y"},
    {"model": "llama", "prompt": [[7, 8], [9]], "max_tokens": 2, "presence_penalty": 1.0, "top_k": 5},
    {
        "model": "llama", "max_tokens": 3, "tools": [_TOOL], "tool_choice": "required",
        "messages": [
            {"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}},
            ]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
    },
    {"model": "support", "input": ["who?", "b"], "encoding_format": "base64", "user": "x"},
    {"lora_name": "help", "lora_path": "support"},
    {"lora_name": "support"},
    {"model": "llama", "training_file": "file-0", "seed": 1, "hyperparameters": {"n_epochs": 1, "batch_size": "auto"}},
]  # fmt: skip
"""Valid requests. `damaged_request` damages a copy of one of them in up to four places."""
ODD_VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    17,
    10**30,
    -(10**30),
    1 << 63,
    1e308,
    -0.0,
    0.5,
    "",
    " ",
    "\x00",
    "x" * 5000,
    "é😀",
    "\u2028",
    "../../etc/passwd",
    "https://example.com/x",
    "file:///etc/passwd",
    [],
    {},
    [[]],
    [{}],
    [None],
    {"": {}},
    "llama",
    "support",
    "user",
    "assistant",
    "tool",
    "system",
    "auto",
    "required",
    "text",
    "json_object",
    "json_schema",
    [7],
    [-1],
    [1 << 40],
    [[5], "x"],
    ["a", 1],
    {"type": "function"},
    {"type": "text", "text": "x"},
    {"type": "image_url", "image_url": {}},
    {"$ref": "#"},
    {"$ref": "https://example.com"},
    {"type": "string", "pattern": "(a+)+$"},
    {"type": "nonsense"},
    {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    {"type": "array", "minItems": 10**9},
    {"enum": []},
    {"not": {}},
    {"type": "string", "pattern": "("},
    {"type": "string", "maxLength": 10**12},
    {"multipleOf": 0},
    {"5": -1000},
    {"-1": 1},
]
"""Values that may replace any part of a request."""


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in _places(each, (*path, key)))]


def _damaged(rng: random.Random, body: Any) -> Any:
    path = rng.choice(_places(body))
    if not path:
        return copy.deepcopy(rng.choice(ODD_VALUES))
    holder = body
    for key in path[:-1]:
        holder = holder[key]
    kind = rng.random()
    if kind < 0.15 and isinstance(holder, dict):
        del holder[path[-1]]
    elif kind < 0.25 and isinstance(holder, dict):
        holder[rng.choice(["x", "audio", "functions", "", "__class__", "é"])] = copy.deepcopy(rng.choice(ODD_VALUES))
    elif kind < 0.3 and isinstance(holder, list):
        holder += [holder[path[-1]]] * rng.choice([1, 20, 2000])
    else:
        holder[path[-1]] = copy.deepcopy(rng.choice(ODD_VALUES))
    return body


def damaged_request(rng: random.Random) -> tuple[str, str, bytes]:
    """Returns (method, path, body) of one request."""
    method, path = rng.choice(METHODS), rng.choice(PATHS[:5] * 4 + PATHS)
    body = json.loads(json.dumps(rng.choice(HONEST_REQUESTS)))
    for _ in range(rng.choice([0, 1, 1, 1, 2, 4])):
        body = _damaged(rng, body) if isinstance(body, dict | list) else body
    data = json.dumps(body).encode()
    kind = rng.random()
    if kind < 0.1 and data:
        at = rng.randrange(len(data))
        data = data[:at] + bytes([rng.randrange(256)]) + data[at + rng.randrange(3) :]
    elif kind < 0.15:
        data = data[: rng.randrange(len(data) + 1)]
    elif kind < 0.2:
        data = rng.choice([b"", b"[" * 100_000, b'{"a":' * 50_000, b"nan", b"\xff\xfe", b"9" * 10_000, data * 2])
    return method, path, data


def play(endpoint: Endpoint, seed: int, num_requests: int, seen: dict[int, int]) -> None:
    rng = random.Random(seed)
    with raw(endpoint) as http:
        for _ in range(num_requests):
            method, path, body = damaged_request(rng)
            answer = http.request(method, path, content=body, headers={"content-type": content_type(path)})
            assert answer.status_code < 500, (method, path, body[:2000], answer.text)
            if answer.status_code >= 400 and method != "HEAD":
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, answer.text
            if "text/event-stream" in answer.headers.get("content-type", ""):
                assert answer.text.endswith("data: [DONE]\n\n") or '"error":{' in answer.text
            seen[answer.status_code] = seen.get(answer.status_code, 0) + 1


def fuzz(client: TenantClient, root: Path, num_requests: int, num_threads: int) -> dict[int, int]:
    """Sends damaged requests, `num_requests` in each thread, and returns how many got each status."""
    save_adapter(client.load_model(), root / "support", 1)
    seen: dict[int, int] = {}
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            play(endpoint, seed, num_requests, seen)
        except BaseException as exc:  # noqa: BLE001 - shown by the test's own thread
            failures.append(exc)

    with endpoint_of(client, root) as endpoint:
        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SLOW_TIMEOUT_S)
        if failures:
            raise failures[0]
        with raw(endpoint) as http:
            assert http.post("/v1/chat/completions", json=chat(messages=WHO)).status_code == 200
        until(lambda: endpoint.engine.status().num_running == 0, "all places to be free")
    return seen


def test_fuzzed_requests(client: TenantClient, tmp_path: Path) -> None:
    seen = fuzz(client, tmp_path / "adapters", 30, 2)
    assert {200, 400, 404} <= set(seen)


@pytest.mark.slow
def test_many_fuzzed_requests(client: TenantClient, tmp_path: Path) -> None:
    seen = fuzz(client, tmp_path / "adapters", 1000, 4)
    assert {200, 400, 404, 405} <= set(seen)
