"""Tests the limits on requests, connections, body sizes and stalled clients: beyond a limit a client gets an error, and
a request that ends frees what it held at once."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tenant_sdk import TenantClient
from tenant_sdk.endpoint import server
from tenant_sdk.endpoint.server import Endpoint
from tenant_sdk.endpoint.settings import EndpointLimits
from tenant_sdk.text.rows import CutWarning
from tests.support.endpoints import KEY, chat, endpoint_of, raw
from tests.support.engines import Gate
from tests.support.spies import before_requests
from tests.support.waiting import comes, end, until


@contextlib.contextmanager
def held(endpoint: Endpoint) -> Iterator[Gate]:
    """Starts a request, and stops the engine in the middle of a step for it while the context lasts."""
    gate = Gate()
    answer = endpoint.engine.submit("b", max_new_tokens=2, logits_processor=[gate])
    comes(gate.reached, "a step")
    try:
        yield gate
    finally:
        gate.open.set()
        answer.result(60)


def connected(endpoint: Endpoint) -> socket.socket:
    host, port = urlsplit(endpoint.url).hostname, urlsplit(endpoint.url).port
    assert host is not None
    assert port is not None
    return socket.create_connection((host, port), timeout=60)


def request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def num_requests(endpoint: Endpoint) -> int:
    status = endpoint.engine.status()
    return status.num_running + status.num_waiting


def test_when_full_it_says_when_to_come_again(client: TenantClient) -> None:
    with endpoint_of(client, max_running=1, max_waiting=1) as endpoint, raw(endpoint) as http:
        with held(endpoint):
            waiting = threading.Thread(target=lambda: http.post("/v1/chat/completions", json=chat()))
            waiting.start()
            until(lambda: endpoint.engine.status().num_waiting == 1, "a request that waits")
            for options in ({}, {"stream": True}, {"n": 3}):
                answer = http.post("/v1/chat/completions", json=chat(**options))
                assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_requests")
                assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert endpoint.engine.status().num_waiting == 1
        end(waiting)
        assert http.post("/v1/chat/completions", json=chat()).status_code == 200


def test_a_request_that_is_refused_in_part_leaves_nothing_behind(client: TenantClient) -> None:
    with endpoint_of(client, max_running=1, max_waiting=2) as endpoint, raw(endpoint) as http, held(endpoint) as gate:
        assert http.post("/v1/chat/completions", json=chat(n=4)).status_code == 429
        gate.open.set()
        until(lambda: num_requests(endpoint) == 0, "the places to be free")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_place_at_once(client: TenantClient, stream: bool) -> None:
    with endpoint_of(client, max_running=1) as endpoint, held(endpoint) as gate:
        with connected(endpoint) as gone:
            gone.sendall(request(chat(max_tokens=900, n=3, stream=stream, logit_bias={"2": -100})))
            until(lambda: num_requests(endpoint) == 4, "the requests")
        until(lambda: endpoint.service.metrics.text().count(b'status="gone"'), "the end of the request")
        gate.open.set()
        until(lambda: num_requests(endpoint) == 0, "the places to be free")
    # had the answers gone on, 2,700 tokens would have been counted
    assert b'veilbase_endpoint_tokens_total{kind="answer"}' not in endpoint.service.metrics.text()


def test_a_client_that_goes_away_in_the_middle_of_a_stream(client: TenantClient) -> None:
    with endpoint_of(client) as endpoint:
        with connected(endpoint) as gone:
            gone.sendall(request(chat(max_tokens=900, stream=True, logit_bias={"2": -100})))
            assert gone.recv(1)
        until(lambda: num_requests(endpoint) == 0, "the place to be free")
        assert b'kind="answer"' not in endpoint.service.metrics.text()


def test_a_stalled_stream_is_cut(client: TenantClient) -> None:
    limits = EndpointLimits(stall_s=0.05)
    with endpoint_of(client, limits=limits) as endpoint:
        connection = connected(endpoint)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        messages = [{"role": "user", "content": "x" * 100}]
        asked = request(chat(max_tokens=900, n=8, stream=True, messages=messages, logit_bias={"2": -100}))
        with connection:
            connection.sendall(asked)
            until(lambda: num_requests(endpoint) > 0, "the request")
            until(lambda: num_requests(endpoint) == 0, "the end of the request, which nobody reads")
            assert b'kind="answer"' not in endpoint.service.metrics.text()


def test_a_body_that_is_too_large(client: TenantClient) -> None:
    with endpoint_of(client, limits=EndpointLimits(body_bytes=2000)) as endpoint, raw(endpoint) as http:
        text = json.dumps(chat(user="x" * 3000)).encode()

        def pieces() -> Iterator[bytes]:
            yield text

        for content in (text, pieces()):  # announced, and in chunks without a length
            answer = http.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert http.post("/v1/chat/completions", json=chat()).status_code == 200


def test_a_body_that_does_not_come(client: TenantClient) -> None:
    limits = EndpointLimits(body_s=0.05, idle_s=0.2)
    with endpoint_of(client, limits=limits) as endpoint, connected(endpoint) as slow, connected(endpoint) as silent:
        slow.sendall(request(chat())[:-5])
        assert slow.recv(1000).startswith(b"HTTP/1.1 408")
        assert silent.recv(1000) == b""  # it never asked anything


def test_a_thousand_connections(client: TenantClient) -> None:
    """Each connection above the limit gets a status 429, and a request on one of the others is still answered."""
    limits = EndpointLimits(connections=40)
    with endpoint_of(client, limits=limits) as endpoint, contextlib.ExitStack() as opened:
        full = 0
        sockets = [opened.enter_context(connected(endpoint)) for _ in range(100)]
        for number in range(9):
            for each in sockets[40:]:
                answer = each.recv(1000)
                assert answer.startswith(b"HTTP/1.1 429 ")
                assert b"too_many_connections" in answer
                assert b"retry-after: 1\r\n" in answer
                full += 1
                each.close()
            if number < 8:
                sockets[40:] = [opened.enter_context(connected(endpoint)) for _ in range(120)]
        assert full == 60 + 8 * 120  # 1,020 connections, 40 at a time
        sockets[0].sendall(request(chat()))
        assert sockets[0].recv(1000).startswith(b"HTTP/1.1 200 ")


# ---- the end of the server -------------------------------------------------------------------------------------------

ENDLESS: dict[str, Any] = {"max_tokens": 900, "logit_bias": {"2": -100}}


def whole(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_requests_under_way_are_told_that_the_server_stops(
    client: TenantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "GRACE_S", 0.05)
    with contextlib.ExitStack() as opened:
        endpoint = opened.enter_context(endpoint_of(client, tmp_path, max_running=1))
        running, waiting, slow = (opened.enter_context(connected(endpoint)) for _ in range(3))
        running.sendall(request(chat(**ENDLESS)))
        until(lambda: endpoint.engine.status().num_running == 1, "the request")
        waiting.sendall(request(chat(**ENDLESS, n=2)))
        until(lambda: endpoint.engine.status().num_waiting == 2, "the requests that wait")
        slow.sendall(request(chat())[:-5])
        idle = opened.enter_context(connected(endpoint))
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle.recv(1000).startswith(b"HTTP/1.1 200 ")  # the requests that were sent before have arrived too
        endpoint.stop()
        for connection in (running, waiting, slow):
            head, _, body = whole(connection).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: " in head
            error = json.loads(body)["error"]
            assert (error["type"], error["code"], error["param"]) == ("server_error", "server_stopping", None)
        until(lambda: not endpoint.is_serving, "the end of the server")


def test_a_stream_ends_with_an_error_when_the_server_stops(
    client: TenantClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "GRACE_S", 0.05)
    for path, body in (("chat/completions", chat()), ("completions", {"model": "llama", "prompt": "who?"})):
        with endpoint_of(client) as endpoint, raw(endpoint) as http:
            asked = {**body, **ENDLESS, "n": 4, "stream": True}
            with http.stream("POST", f"/v1/{path}", json=asked) as answer:
                lines = answer.iter_lines()
                assert next(lines).startswith("data: ")
                endpoint.stop()
                last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_stopping"


def test_an_answer_that_is_nearly_complete_is_given_when_the_server_stops(client: TenantClient) -> None:
    answers: list[Any] = []
    with endpoint_of(client, max_running=2) as endpoint, raw(endpoint) as http, held(endpoint) as gate:
        asked = threading.Thread(target=lambda: answers.append(http.post("/v1/chat/completions", json=chat())))
        asked.start()
        until(lambda: num_requests(endpoint) == 2, "the request")
        endpoint.stop()
        gate.open.set()
        end(asked)
    assert [answer.status_code for answer in answers] == [200]


def test_what_is_not_http_is_told_so(endpoint: Endpoint) -> None:
    for data in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"GET\r\n\r\n", b"A" * 70_000):
        with connected(endpoint) as odd:
            odd.sendall(data + b"\r\n\r\n")
            answer = odd.recv(1000)
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "invalid_http"


def test_limits_on_parts_of_a_request(endpoint: Endpoint) -> None:
    who = {"role": "user", "content": "who?"}
    tool = {"type": "function", "function": {"name": "x", "description": "y" * 600}}
    tools = [{**tool, "function": {**tool["function"], "name": f"x{number}"}} for number in range(128)]  # type: ignore[dict-item]
    huge = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(5000)}}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": huge}}
    with raw(endpoint) as http:
        for field, value in {
            "messages": [who] * 1025, "tools": tools, "n": 17, "stop": ["x"] * 17, "response_format": shape,
            "logit_bias": {str(number): 1.0 for number in range(1025)},
        }.items():  # fmt: skip
            answer = http.post("/v1/chat/completions", json=chat(**{field: value}))
            assert answer.status_code == 400, field
            assert answer.json()["error"]["param"] == field


LONG = "who is it? " * 2000
"""A text with far more characters than the tiny model's context holds tokens."""


@pytest.mark.filterwarnings("ignore::tenant_sdk.CutWarning")
def test_padded_prompts_are_cut_and_not_refused_by_length(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `pad_rows` a text of any length takes the same rows: a refusal would be visible to the provider."""
    rows: list[int] = []
    before_requests(monkeypatch, lambda call, payload: rows.append(payload.num_rows))
    ids = [7] * 2000
    bodies = [
        ("chat/completions", chat(messages=[{"role": "user", "content": text}], fixed_length=True))
        for text in ("who?", LONG)
    ] + [
        ("completions", {"model": "llama", "prompt": prompt, "max_tokens": 4, "fixed_length": True})
        for prompt in ("who?", LONG, ids[:9], ids)
    ]
    talk = [
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": "Ada"},
        {"role": "user", "content": "!"},
    ]
    bodies.append(("chat/completions", chat(messages=talk, fixed_length=True)))
    options: dict[str, Any] = {"mask": "off", "cache": tmp_path / "cache", "progress": False}
    with TenantClient(f"inproc:{folder}", pad_rows=64, **options) as client, endpoint_of(client) as endpoint:
        seen, texts = set(), []
        for path, body in bodies:
            rows.clear()
            with raw(endpoint) as http:
                answer = http.post(f"/v1/{path}", json=body)
            assert answer.status_code == 200, answer.text
            seen.add(tuple(rows))
            texts.append(answer.json()["choices"][0])
        assert len(seen) == 1
        assert texts[1]["message"]["content"] == client.generate(LONG, max_new_tokens=4), "the same tokens are kept"
        assert texts[-1]["message"]["content"] == client.generate(talk, max_new_tokens=4)
        with pytest.warns(CutWarning, match="22000 characters: its beginning is left out"), raw(endpoint) as http:
            http.post("/v1/chat/completions", json=bodies[1][1])
