"""Serves tiny models over HTTP on loopback, for official clients and raw ones."""

from __future__ import annotations

import contextlib
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
