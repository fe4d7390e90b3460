"""This module reads and checks the URL of a provider that is reached by gRPC, without loading gRPC or torch."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from wire.errors import ConfigurationError

DEFAULT_PORT = 8443
_SCHEMES = ("grpc", "grpcs")
_PORT = re.compile(r":\d+$")


def is_loopback(host: str) -> bool:
    """Returns whether a host is `localhost` or a loopback address. Any other name counts as False, since it could lead
    to any address, and is not resolved."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def not_a_url(url: str) -> str:
    """Returns the error text about a URL of a provider that has none of the forms there are. If it names a host in
    another way, such as `https://host:8443` or `host:8443`, the text says how it is written here."""
    scheme, has_scheme, rest = url.rpartition("://")
    place = re.split(r"[/?#]", rest)[0]
    is_place = re.fullmatch(r"([\w.-]+|\[[\da-fA-F:.]+\])(:\d+)?", place, re.ASCII) is not None
    named = is_place and (has_scheme or _PORT.search(place)) and scheme not in ("ipc", "inproc")
    advice = f": did you mean grpcs://{place}?" if named and url != f"grpcs://{place}" else ""
    # without a password or a token, which no URL of a provider has
    shown = re.sub("^(.*?://)?.*@", r"\1...@", re.sub("[?#].*", "...", url, flags=re.DOTALL), flags=re.DOTALL)
    return f"expected grpcs://host:port, ipc:DIR or inproc:MODEL, got {ascii(shown)[:200]}{advice}"


def read_address(url: str, has_identity: bool) -> tuple[str, str, int]:
    """Returns scheme, host and port of `grpcs://host[:port]`, or of `grpc://` on loopback. Without a port it is
    `DEFAULT_PORT`.

    Args:
        url: the provider's URL.
        has_identity: whether the tenant has an identity for this provider.

    Raises:
        ConfigurationError: the URL has another scheme, no host, or more than host and port; an identity is missing, or
            is given beside plain text; or plain text would go to another machine.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or DEFAULT_PORT
    except ValueError as exc:  # The port is no number, or a bracket was left open.
        raise ConfigurationError(not_a_url(url)) from exc
    has_more = parts.path not in ("", "/") or parts.query or parts.fragment or "@" in parts.netloc
    if parts.scheme not in _SCHEMES or not host or parts.port == 0 or has_more:
        raise ConfigurationError(not_a_url(url))
    if parts.scheme == "grpcs" and not has_identity:
        raise ConfigurationError("a grpcs:// URL needs an identity, the folder that `provider enroll` made")
    if parts.scheme == "grpc" and not is_loopback(host):
        raise ConfigurationError("grpc:// without TLS is for loopback only: use grpcs://")
    if parts.scheme == "grpc" and has_identity:
        raise ConfigurationError(
            "a grpc:// URL is without TLS, so an identity (--identity) would say nothing to the provider: leave it "
            "out, or use grpcs:// for a provider that was started with --tls"
        )
    return parts.scheme, host, port
