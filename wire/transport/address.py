"""This module reads and checks the URL of a provider that is reached by gRPC, without loading gRPC or torch."""

from __future__ import annotations

from urllib.parse import urlsplit

from wire.errors import ConfigurationError

DEFAULT_PORT = 8443
_SCHEMES = ("grpc", "grpcs")


def is_loopback(host: str) -> bool:
    """Returns whether a host's name or address is this machine's own, as far as its spelling tells."""
    return host in ("localhost", "::1") or host.startswith("127.")


def read_address(url: str, has_identity: bool) -> tuple[str, str, int]:
    """Returns scheme, host and port of `grpcs://host[:port]`, or of `grpc://` on loopback.

    Args:
        url: the provider's URL.
        has_identity: whether the tenant has an identity for this provider.

    Raises:
        ConfigurationError: the URL has another scheme or no host, an identity is missing, or plain text would go to
            another machine.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or DEFAULT_PORT
    except ValueError as exc:  # The port is no number, or a bracket was left open.
        raise ConfigurationError(f"expected grpcs://host:port, got {url!r}") from exc
    if parts.scheme not in _SCHEMES or not host:
        raise ConfigurationError(f"expected grpcs://host:port, got {url!r}")
    if parts.scheme == "grpcs" and not has_identity:
        raise ConfigurationError("a grpcs:// URL needs an identity, the folder that `provider enroll` made")
    if parts.scheme == "grpc" and not is_loopback(host):
        raise ConfigurationError("grpc:// without TLS is for loopback only: use grpcs://")
    return parts.scheme, host, port
