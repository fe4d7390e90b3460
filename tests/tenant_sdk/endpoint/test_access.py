"""Tests where an endpoint may listen, and which requests it answers, by their address, host, origin, key and content
type."""

from __future__ import annotations

import http.client
import json
import logging
import re
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tenant_sdk import TenantClient
from tenant_sdk.endpoint.command import serving_settings
from tenant_sdk.endpoint.server import Endpoint
from tenant_sdk.endpoint.settings import EndpointSettings, check_may_listen, is_loopback, new_key, read_key
from tests.support.endpoints import KEY, chat, raw
from tests.support.waiting import until
from wire.errors import ConfigurationError

PEM = {"tls_cert": Path("cert.pem"), "tls_key": Path("key.pem")}
ALL: dict[str, Any] = {"host": "0.0.0.0", "key": KEY, "is_own_key": True, **PEM}  # noqa: S104


# ---- who may listen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["TLS", "a key", "a verified provider"])
def test_beyond_this_machine_all_three_are_needed(missing: str) -> None:
    check_may_listen(EndpointSettings(**ALL), is_verified=True)
    without = {"TLS": dict.fromkeys(PEM), "a key": {"is_own_key": False}}.get(missing, {})
    with pytest.raises(ConfigurationError, match=f"beyond this machine, 0.0.0.0 needs {missing}"):
        check_may_listen(EndpointSettings(**{**ALL, **without}, unverified=True), missing != "a verified provider")


def test_on_this_machine_unverified_has_to_be_said() -> None:
    with pytest.raises(ConfigurationError, match="--unverified"):
        check_may_listen(EndpointSettings(), is_verified=False)
    check_may_listen(EndpointSettings(unverified=True), is_verified=False)
    check_may_listen(EndpointSettings(), is_verified=True)
    with pytest.raises(ConfigurationError, match="both"):
        check_may_listen(EndpointSettings(tls_cert=Path("x")), is_verified=True)


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("127.9.9.9", True),
        ("0.0.0.0", False),  # noqa: S104
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.com", False),
        ("", False),
        ("127.1", False),
    ],
)
def test_which_addresses_are_this_machine(host: str, is_own: bool) -> None:
    assert is_loopback(host) is is_own


def test_an_endpoint_that_may_not_listen_does_not(client: TenantClient) -> None:
    with pytest.raises(ConfigurationError, match="--unverified"):
        Endpoint(client, settings=EndpointSettings(port=0))
    with pytest.raises(ConfigurationError, match="TLS"):
        Endpoint(client, settings=EndpointSettings(host="0.0.0.0", port=0, unverified=True))  # noqa: S104


def test_an_address_that_is_taken(client: TenantClient, endpoint: Endpoint) -> None:
    port = urlsplit(endpoint.url).port
    assert port is not None
    # listening on a port that another server listens to fails when the engine is there; only the text matters here
    with (
        pytest.raises(ConfigurationError, match="cannot be listened to"),
        Endpoint(client, settings=EndpointSettings(port=port, unverified=True)),
    ):
        raise AssertionError


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    file.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        read_key(file)
    file.chmod(0o600)
    assert read_key(file) == KEY
    for wrong in ("short", "", "with a space in it and long enough", "x" * 600, "ключ-ключ-ключ-ключ"):
        file.write_text(wrong)
        with pytest.raises(ConfigurationError, match="one key of 16 to 512"):
            read_key(file)
    with pytest.raises(ConfigurationError, match="there is no file"):
        read_key(tmp_path / "none")
    assert new_key() != new_key()
    assert len(new_key()) > 40
    assert KEY not in repr(EndpointSettings(key=KEY))


def test_the_command_makes_a_key_where_none_is_given(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 0,
        "api_key_file": None,
        "tls_cert": None,
        "tls_key": None,
        "unverified": True,
        "release_values": None,
        "is_verified": False,
    }
    made = serving_settings(**given)
    assert made.key
    assert not made.is_own_key
    with pytest.raises(ConfigurationError, match="is not a file"):
        serving_settings(**{**given, "tls_cert": tmp_path / "none"})
    with pytest.raises(ConfigurationError, match="a verified provider"):
        serving_settings(**{**given, "host": "192.0.2.1"})


# ---- which requests are answered -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "[::2]",
        "",
        "localhost:x",
        "user@localhost",
    ],
)
def test_a_name_bound_to_this_machine_gets_nothing(endpoint: Endpoint, host: str) -> None:
    """With DNS rebinding, a foreign page's host name resolves to this machine, so the browser treats its requests as
    same-origin. The endpoint must refuse the unknown host name."""
    with raw(endpoint, host=host, origin=f"http://{host}") as client:
        for path in ("/", "/health", "/v1/models"):
            answer = client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (421, "wrong_host")


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1", "[::1]:8000", "LOCALHOST", "[::1]"])
def test_names_of_this_machine(endpoint: Endpoint, host: str) -> None:
    with raw(endpoint, host=host) as client:
        assert client.get("/v1/models").status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost:3000", "https://127.0.0.1", ""])
def test_a_cross_site_post_gets_nothing(endpoint: Endpoint, origin: str) -> None:
    with raw(endpoint, origin=origin) as client:
        answer = client.post("/v1/chat/completions", json=chat())
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wrong_origin")


def test_a_browser_says_that_another_site_asks(endpoint: Endpoint) -> None:
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        with raw(endpoint, **{"sec-fetch-site": site}) as client:
            assert client.get("/v1/models").status_code == status


def test_a_page_of_this_server_may_ask(endpoint: Endpoint) -> None:
    with raw(endpoint, origin=endpoint.url.removesuffix("/v1")) as client:
        assert client.post("/v1/chat/completions", json=chat()).status_code == 200


def test_no_other_site_is_allowed_by_a_header(endpoint: Endpoint) -> None:
    with raw(endpoint) as client:
        asked = client.options("/v1/chat/completions", headers={"access-control-request-method": "POST"})
        for answer in (asked, client.get("/v1/models"), client.post("/v1/chat/completions", json=chat())):
            assert not [name for name in answer.headers if name.startswith("access-control")]
        assert asked.status_code == 405


@pytest.mark.parametrize(
    "given", ["", KEY, f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer", "Bearer \xff\xfe"]
)
def test_a_wrong_key(endpoint: Endpoint, given: str) -> None:
    with raw(endpoint) as client:
        for path in ("/v1/models", "/metrics", "/v1/nothing"):
            answer = client.get(path, headers=[(b"authorization", given.encode("latin-1"))])
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert client.get("/health", headers={"authorization": ""}).status_code == 200


def test_a_header_that_comes_twice(endpoint: Endpoint) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(endpoint.url).port)
    connection.putrequest("GET", "/v1/models")
    for key in (KEY, "other"):
        connection.putheader("Authorization", f"Bearer {key}")
    connection.endheaders()
    assert connection.getresponse().status == 400
    connection.close()


@pytest.mark.parametrize(
    ("version", "headers"),
    [
        ("1.1", "Content-Length: 5\r\nTransfer-Encoding: chunked"),
        ("1.1", "transfer-encoding: Chunked\r\ncontent-length: 5"),
        ("1.0", "Transfer-Encoding: chunked"),
    ],
)
@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/chat/completions"])
def test_a_request_with_two_ends_is_refused_and_its_connection_ends(
    endpoint: Endpoint, path: str, version: str, headers: str
) -> None:
    """What a proxy takes for the rest of the body would be another request here (request smuggling)."""
    smuggled = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n\r\n"
    method = "POST" if path.endswith("completions") else "GET"
    head = f"{method} {path} HTTP/{version}\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n{headers}\r\n"
    address = ("127.0.0.1", urlsplit(endpoint.url).port)
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n0\r\n\r\n{smuggled}".encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))  # up to the end of the connection
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert version == "1.0" or b"connection: close" in answer
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "invalid_framing"


def test_forms_of_other_sites_are_no_json(endpoint: Endpoint) -> None:
    with raw(endpoint) as client:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
            answer = client.post("/v1/chat/completions", content=b"{}", headers={"content-type": kind})
            assert answer.status_code == 415
        answer = client.post("/v1/models", json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize(
    ("method", "path", "changes", "line"),
    [
        ("GET", "/health", {}, "GET /health 200 ok"),
        ("HEAD", "/", {}, "HEAD / 200 ok"),
        ("GET", "/metrics", {}, "GET /metrics 200 ok"),
        ("GET", "/v1/models", {"authorization": "Bearer no"}, "GET /v1/models 401 invalid_api_key"),
        ("GET", "/v1/models/owl", {"authorization": "Bearer no"}, "GET /v1/models/NAME 401 invalid_api_key"),
        ("GET", "/v1/models/owl", {}, "GET /v1/models/NAME 404 model_not_found"),
        ("GET", "/v1/files/owl", {"authorization": "Bearer no"}, "GET /v1/files 401 invalid_api_key"),
        ("DELETE", "/v1/files/owl", {}, "DELETE /v1/files 404 not_found"),
        ("POST", "/v1/fine_tuning/jobs/owl/cancel", {}, "POST /v1/fine_tuning/jobs 404 not_found"),
        ("GET", "/owl", {"host": "owl.example"}, "GET - 421 wrong_host"),
        ("OWL", "/v1/owl", {}, "- - 404 not_found"),
        ("PUT", "/v1/models", {}, "PUT /v1/models 405 method_not_allowed"),
        ("POST", "/v1/completions", {"content-type": "owl"}, "POST /v1/completions 415 invalid_content_type"),
        ("POST", "/v1/completions", {"content-length": "999999999"}, "POST /v1/completions 413 body_too_large"),
        ("POST", "/v1/embeddings", {"origin": "owl"}, "POST /v1/embeddings 403 wrong_origin"),
        ("GET\x00", "/owl", {}, "- - 400 invalid_http"),
    ],
)
def test_every_response_has_a_line_with_method_route_status_and_time(
    endpoint: Endpoint, method: str, path: str, changes: dict[str, str], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    def lines() -> list[str]:
        """Returns the lines that are the expected one but for the time. The last line of an earlier test, which comes
        after its response, may be among the others."""
        found = [record.getMessage() for record in caplog.records if record.name == "veilbase.endpoint"]
        return [one for one in found if re.sub(r" \d+ ms$", "", one) == line]

    headers = {
        "host": "localhost", "authorization": f"Bearer {KEY}", "content-type": "application/json", "connection": "close"
    }  # fmt: skip
    head = "".join(f"{name}: {value}\r\n" for name, value in {**headers, **changes}.items())
    with (
        caplog.at_level(logging.INFO, "veilbase.endpoint"),
        socket.create_connection(("127.0.0.1", urlsplit(endpoint.url).port), timeout=60) as connection,
    ):
        connection.sendall(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode())
        status = connection.recv(1 << 16).split(b" ", 2)[1].decode()
        until(lines, "the line in the log, which comes after the response")
    assert status in line
    assert len(lines()) == 1
    assert lines() != [line]


def test_no_contents_and_no_key_in_logs_and_metrics(endpoint: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    secret = "the copper owl"
    with caplog.at_level(logging.DEBUG), raw(endpoint) as client:
        messages = [{"role": "user", "content": secret}]
        answered = client.post("/v1/chat/completions", json=chat(messages=messages)).json()
        client.post("/v1/chat/completions", json=chat(model=secret))
        client.post("/v1/chat/completions", content=secret.encode(), headers={"content-type": "application/json"})
        client.get(f"/v1/{secret}")
        client.get("/v1/models", headers={"authorization": f"Bearer {secret}"})
        metrics = client.get("/metrics")
    own = [record.getMessage() for record in caplog.records if record.name == "veilbase.endpoint"]
    assert all(re.fullmatch(r"\S+ \S+ \d+ \S+ \d+ ms", line) for line in own)
    assert [line.split(" ms")[0].rsplit(" ", 1)[0] for line in own[:5]] == [
        "POST /v1/chat/completions 200 ok",
        "POST /v1/chat/completions 404 model_not_found",
        "POST /v1/chat/completions 400 invalid_json",
        "GET - 404 not_found",
        "GET /v1/models 401 invalid_api_key",
    ]
    text = answered["choices"][0]["message"]["content"]
    for line in own:
        assert not any(each in line for each in (secret, "copper", KEY))
        assert text not in line
    assert metrics.headers["content-type"].startswith("text/plain; version=")
    assert 'veilbase_endpoint_requests_total{route="/v1/chat/completions",status="404"}' in metrics.text
    assert 'veilbase_endpoint_tokens_total{kind="answer"}' in metrics.text
    assert "veilbase_endpoint_requests_running" in metrics.text
    assert not any(each in metrics.text for each in ("copper", KEY, "llama"))
