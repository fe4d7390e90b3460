"""Tests that every invalid request gets an error in OpenAI's format with a fitting status, and one line in the log, and
that no request causes a status 500."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from pathlib import Path
from typing import Any

import pydantic
import pytest

from tenant_sdk import TenantClient
from tenant_sdk.endpoint.errors import HttpError
from tenant_sdk.endpoint.schema import ChatRequest, CompletionRequest, EmbeddingRequest, parsed
from tenant_sdk.endpoint.server import Endpoint
from tests.support.endpoints import WHO, chat, endpoint_of, raw
from tests.support.fuzzed_requests import made
from tests.support.saved_adapters import save_adapter
from tests.support.waiting import end, until

USER = {"role": "user", "content": "who?"}
CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT: list[tuple[dict[str, Any], str | None]] = [
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 1.5}, "n"),
    ({"max_tokens": 10**6}, None),
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
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, None),
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
    ({"functions": []}, "functions"),
    ({"audio": {}}, "audio"),
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


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b"nan", b"[]", b"9" * 10_000, b"[" * 100_000, b'{"model": NaN}', b"null"]
)
def test_what_is_no_json_object(endpoint: Endpoint, body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    def lines() -> list[str]:  # other loggers may write too
        return [record.getMessage() for record in caplog.records if record.name == "veilbase.endpoint"]

    with caplog.at_level(logging.INFO, "veilbase.endpoint"), raw(endpoint) as http:
        answer = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] in ("invalid_json", "invalid_value")
        until(lines, "the line in the log, which comes after the answer")
    assert len(lines()) == 1
    assert lines()[0].startswith("/v1/chat/completions 400 invalid_")


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
    faults = b",".join(b'"%x": []' % number for number in range(300_000))
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
            assert "the model's context holds" in answer.json()["error"]["message"]


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


def play(endpoint: Endpoint, seed: int, seconds: float, seen: dict[int, int]) -> None:
    rng, give_up_at = random.Random(seed), time.monotonic() + seconds
    with raw(endpoint) as http:
        while time.monotonic() < give_up_at:
            method, path, body = made(rng)
            answer = http.request(method, path, content=body, headers={"content-type": content_type(path)})
            assert answer.status_code < 500, (method, path, body[:2000], answer.text)
            if answer.status_code >= 400 and method != "HEAD":
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, answer.text
            if "text/event-stream" in answer.headers.get("content-type", ""):
                assert answer.text.endswith("data: [DONE]\n\n") or '"error":{' in answer.text
            seen[answer.status_code] = seen.get(answer.status_code, 0) + 1


def fuzz(client: TenantClient, root: Path, seconds: float, num_threads: int) -> dict[int, int]:
    save_adapter(client.load_model(), root / "support", 1)
    seen: dict[int, int] = {}
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            play(endpoint, seed, seconds, seen)
        except BaseException as exc:  # noqa: BLE001 - shown by the test's own thread
            failures.append(exc)

    with endpoint_of(client, root) as endpoint:
        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds + 60)
        end(threads)
        if failures:
            raise failures[0]
        with raw(endpoint) as http:
            assert http.post("/v1/chat/completions", json=chat(messages=WHO)).status_code == 200
        until(lambda: endpoint.engine.status().num_running == 0, "all places to be free")
    return seen


def test_fuzzed_requests(client: TenantClient, tmp_path: Path) -> None:
    seen = fuzz(client, tmp_path / "adapters", 1.5, 2)
    assert {200, 400, 404} <= set(seen)


@pytest.mark.slow
def test_fuzzed_requests_for_two_minutes(client: TenantClient, tmp_path: Path) -> None:
    seen = fuzz(client, tmp_path / "adapters", 120.0, 4)
    assert {200, 400, 404, 405} <= set(seen)
    assert sum(seen.values()) > 1000
