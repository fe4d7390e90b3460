"""Tests an endpoint that listens beyond loopback: it has TLS, the operator's key and a verified provider, and answers
requests."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx2
import openai
import pytest
import trustme

from tenant_sdk import TenantClient
from tenant_sdk.endpoint.server import Endpoint
from tenant_sdk.endpoint.settings import EndpointSettings
from tests.support.endpoints import KEY, WHO, chat


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])  # noqa: S104
def test_with_tls_a_key_and_a_verified_provider(folder: Path, tmp_path: Path, host: str) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    for number, blob in enumerate(issued.cert_chain_pems):
        blob.write_to_path(str(cert), append=number > 0)
    issued.private_key_pem.write_to_path(str(key))
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
