"""Serves tiny models over HTTP on loopback, for official clients and raw ones, and makes requests that no honest client
would send: damaged JSON, odd values in every field, and odd paths."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai

from tenant_sdk import TenantClient
from tenant_sdk.endpoint.server import Endpoint
from tenant_sdk.endpoint.settings import EndpointLimits, EndpointSettings

WHO = [{"role": "user", "content": "who?"}]
"""A conversation that every tiny model answers."""
KEY = "sk-test-0123456789abcdef"
"""The key of every endpoint here."""
NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""What a client of an http: URL takes for TLS. By default it would read all of the world's authorities, which takes
longer than most requests here."""


@contextlib.contextmanager
def endpoint_of(
    client: TenantClient, adapters: Path | None = None, *, limits: EndpointLimits | None = None,
    release_step: float | None = None, **options: Any,
) -> Iterator[Endpoint]:  # fmt: skip
    """Serves a client on a free loopback port."""
    settings = EndpointSettings(
        port=0, key=KEY, unverified=True, release_step=release_step, limits=limits or EndpointLimits()
    )
    with client.serve(adapters, settings=settings, **options) as endpoint:
        yield endpoint


def official(endpoint: Endpoint) -> openai.OpenAI:
    """Returns OpenAI's own client, set to send each request only once."""
    http = openai.DefaultHttpxClient(verify=NO_AUTHORITIES)
    return openai.OpenAI(base_url=endpoint.url, api_key=KEY, max_retries=0, timeout=60, http_client=http)


def raw(endpoint: Endpoint, **headers: str) -> httpx2.Client:
    """Returns an HTTP client that sends requests unchanged. It adds the endpoint's key, unless `headers` has another
    `authorization`."""
    base, sent = endpoint.url.removesuffix("/v1"), {"authorization": f"Bearer {KEY}", **headers}
    return httpx2.Client(base_url=base, headers=sent, timeout=60, verify=NO_AUTHORITIES)


def chat(**fields: Any) -> dict[str, Any]:
    """Returns the body of a small chat request, with `fields` added or replaced."""
    return {"model": "llama", "messages": WHO, "max_tokens": 4, "temperature": 0, **fields}


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
