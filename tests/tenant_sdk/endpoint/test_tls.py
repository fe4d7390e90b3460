"""Tests an endpoint that listens beyond loopback: it has TLS, the operator's key and a verified provider, and answers
requests."""

from __future__ import annotations

import contextlib
import socket
import ssl
from pathlib import Path

import httpx2
import openai
import pytest
import trustme

from tenant_sdk import TenantClient
from tenant_sdk.endpoint.server import MOST_ENDING, Endpoint, ListeningSocket
from tenant_sdk.endpoint.settings import EndpointLimits, EndpointSettings
from tests.support.endpoints import KEY, WHO, chat
from tests.support.waiting import WAIT_S


def issue(authority: trustme.CA, folder: Path) -> tuple[Path, Path]:
    """Returns the files of a certificate chain for loopback and of its key."""
    issued = authority.issue_cert("localhost", "127.0.0.1")
    cert, key = folder / "cert.pem", folder / "key.pem"
    for number, blob in enumerate(issued.cert_chain_pems):
        blob.write_to_path(str(cert), append=number > 0)
    issued.private_key_pem.write_to_path(str(key))
    return cert, key


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])  # noqa: S104
def test_with_tls_a_key_and_a_verified_provider(folder: Path, tmp_path: Path, host: str) -> None:
    authority = trustme.CA()
    cert, key = issue(authority, tmp_path)
    settings = EndpointSettings(host, 0, KEY, True, cert, key)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    options = {"mask": "off", "verify": str(folder), "cache": tmp_path / "cache", "progress": False}
    with TenantClient(f"inproc:{folder}", **options) as client, Endpoint(client, settings=settings) as endpoint:  # type: ignore[arg-type]
        assert endpoint.url.startswith("https://")
        url = endpoint.url.replace("0.0.0.0", "localhost")  # noqa: S104
        with openai.OpenAI(base_url=url, api_key=KEY, http_client=httpx2.Client(verify=trusting)) as ai:
            answer = ai.chat.completions.create(model="llama", messages=WHO, max_tokens=4, temperature=0)  # type: ignore[arg-type]
            assert answer.choices[0].message.content == client.generate("who?", max_new_tokens=4)
        with httpx2.Client(verify=trusting) as http:
            for headers, status in (
                ({}, 401),
                ({"authorization": f"Bearer {KEY}", "origin": "https://evil.example"}, 403),
            ):
                asked = http.post(f"{url}/chat/completions", json=chat(), headers=headers)
                assert asked.status_code == status
        with httpx2.Client() as strict, pytest.raises(httpx2.ConnectError):
            strict.get(f"{url}/models")
        with pytest.raises(httpx2.TransportError):
            httpx2.get(url.replace("https", "http") + "/models")


def test_unfinished_handshakes_keep_nobody_out(client: TenantClient, tmp_path: Path) -> None:
    authority = trustme.CA()
    cert, key = issue(authority, tmp_path)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    limits = EndpointLimits(connections=4, handshake_s=60.0)
    settings = EndpointSettings("127.0.0.1", 0, KEY, True, cert, key, unverified=True, limits=limits)
    with Endpoint(client, settings=settings) as endpoint, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", int(endpoint.url.split(":")[2].split("/")[0]))
        silent = [stack.enter_context(socket.create_connection(address, WAIT_S)) for _ in range(10)]
        for early in silent[:6]:  # all but the four last
            assert early.recv(1) == b""
        with httpx2.Client(verify=trusting) as http:
            got = http.get(f"{endpoint.url}/models", headers={"authorization": f"Bearer {KEY}"})
            assert got.status_code == 200
            assert silent[6].recv(1) == b""
            again = http.get(f"{endpoint.url}/models", headers={"authorization": f"Bearer {KEY}"})
            assert again.status_code == 200  # a complete handshake counts no longer


def test_a_handshake_that_takes_too_long_is_ended(client: TenantClient, tmp_path: Path) -> None:
    cert, key = issue(trustme.CA(), tmp_path)
    settings = EndpointSettings(
        "127.0.0.1", 0, KEY, True, cert, key, unverified=True, limits=EndpointLimits(handshake_s=0.2)
    )
    with Endpoint(client, settings=settings) as endpoint:
        address = ("127.0.0.1", int(endpoint.url.split(":")[2].split("/")[0]))
        with socket.create_connection(address, WAIT_S) as silent:
            assert silent.recv(1) == b""


def test_clients_that_do_not_let_go_keep_few_descriptors(client: TenantClient, tmp_path: Path) -> None:
    """A connection over the limit stays open until its client has ended TLS. Connections of clients that never do this
    must not pile up."""
    authority = trustme.CA()
    cert, key = issue(authority, tmp_path)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    settings = EndpointSettings(
        "127.0.0.1", 0, KEY, True, cert, key, unverified=True, limits=EndpointLimits(connections=2)
    )
    with Endpoint(client, settings=settings) as endpoint, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", int(endpoint.url.split(":")[2].split("/")[0]))

        def ask(said: bytes = b"") -> bytes:
            plain = stack.enter_context(socket.create_connection(address, WAIT_S))
            secure = stack.enter_context(trusting.wrap_socket(plain, server_hostname="localhost"))
            secure.sendall(said)
            return secure.recv(12)

        for _ in range(2):
            assert ask(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n") == b"HTTP/1.1 401"
        assert {ask() for _ in range(MOST_ENDING)} == {b"HTTP/1.1 429"}
        for _ in range(3):
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                assert ask() == b""


def test_no_more_is_accepted_before_what_was_shut_is_closed() -> None:
    limits = EndpointLimits(connections=2)
    with (
        ListeningSocket(socket.AF_INET, socket.SOCK_STREAM, 0, limits, has_tls=True) as listening,
        contextlib.ExitStack() as stack,
    ):
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        for _ in range(2 + MOST_ENDING + 1):
            stack.enter_context(socket.create_connection(listening.getsockname(), WAIT_S))
        taken = [stack.enter_context(listening.accept()[0]) for _ in range(2 + MOST_ENDING)]
        with pytest.raises(BlockingIOError):
            listening.accept()
        taken[0].close()
        stack.enter_context(listening.accept()[0])
