"""This module holds the endpoint's settings and options, and decides who may listen to it.

`EndpointOptions` are the two options of an engine that an endpoint sets otherwise than an `Engine` of one's own. With
`EngineOptions` and `StoreOptions` (serving/settings.py) they are the keyword arguments of `Endpoint` and
`TenantClient.serve`, and flags of `tenant serve`.

Guarantees: beyond loopback an endpoint starts only with TLS, a key that the operator chose, and a verified provider. On
loopback it starts without verification only if the settings say so (`unverified`).
"""

from __future__ import annotations

import math
import re
import secrets
import socket
import ssl
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from noise.params import NOMINAL_SIGMA
from tenant_sdk.options import split_keywords, told
from tenant_sdk.plain_values import positive
from tenant_sdk.serving.settings import (
    EngineKeywords,
    EngineOptions,
    StoreKeywords,
    StoreOptions,
    check_store_early,
)
from wire.errors import ConfigurationError
from wire.transport.address import is_loopback

_Socket = TypeVar("_Socket", bound=socket.socket)
_LEAST_STEP, _MOST_STEP = 0.25, 16.0
"""The smallest and the largest step of rounding that an operator may choose. With the default parameters, the error
moves logprobs of SmolLM2-135M by 0.0014 (standard deviation), which a step of 0.25 covers 180 times: a value tells
log2(1 + 12·(0.0014/0.25)²)/2 bits about its row's error, so twenty for each of a block's 512 rows tell 3 bits.
Parameters with a larger error need a step that is larger in the same proportion."""
_KEY = re.compile(r"[\x21-\x7e]{16,512}")


@dataclass(frozen=True)
class EndpointLimits:
    """Holds the limits on requests and connections.

    Attributes:
        body_bytes: the largest body of a request.
        file_bytes: the largest upload of a training file.
        file_rows: the most lines of a training file. Checking a million takes some ten seconds of one processor, and a
            job holds all rows in memory.
        row_bytes: the longest line of a training file. Read as JSON, a line may take seventy times its bytes.
        held_bytes: the most bytes of bodies that are held in memory at a time, of all requests together.
        body_s: the seconds within which a whole request has to arrive.
        connections: the most connections at a time, and over TLS the most unfinished handshakes beside them.
        handshake_s: the seconds that a TLS handshake may take.
        stall_s: the seconds for which a client may leave a response unread.
        idle_s: the seconds for which a connection may stay without a request.
        schema_bytes: the largest JSON schema or list of tools.
        schema_patterns: the most regular expressions in the schemas of a request.
        schema_intersections: the most members of `allOf` after the first, in the schemas of a request together.
        schemas_waiting: the most schemas that wait to be compiled, beside those that are being compiled.
        schemas_held: the most requests with a schema that are under way.
        schemas_bytes: the most memory that the schemas of all requests take. Beyond it, the largest one fails.
        stuck_s: the seconds after which work on a request in a thread, such as reading it, counts as stuck.
        stalled_s: the seconds after which a step of the engine, or work on files and adapters, counts as stuck. A step
            waits for the provider, and with large models may take minutes.
    """

    body_bytes: int = 4 << 20
    file_bytes: int = 64 << 20
    file_rows: int = 1_000_000
    row_bytes: int = 1 << 20
    held_bytes: int = 256 << 20
    body_s: float = 30.0
    connections: int = 256
    handshake_s: float = 10.0
    stall_s: float = 30.0
    idle_s: float = 30.0
    schema_bytes: int = 64 << 10
    schema_patterns: int = 128
    schema_intersections: int = 32
    schemas_waiting: int = 64
    schemas_held: int = 128
    schemas_bytes: int = 1 << 30
    stuck_s: float = 30.0
    stalled_s: float = 300.0


@dataclass(frozen=True)
class EndpointSettings:
    """Holds where an endpoint listens and what it releases.

    Attributes:
        host, port: the address; port 0 takes a free port.
        key: the key that requests carry; see `read_key` and `new_key`.
        is_own_key: whether the operator chose the key; otherwise it is new and must be shown.
        tls_cert, tls_key: the PEM files of a certificate chain and its private key, or None for plain HTTP.
        unverified: whether the endpoint may run on loopback although replies are not verified.
        release_step: the step to which released numbers are rounded under a mask that leaves an error (privacy.py);
            None refuses to release them.
        limits: the limits for clients.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    key: str = field(default="", repr=False)
    is_own_key: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    unverified: bool = False
    release_step: float | None = None
    limits: EndpointLimits = field(default_factory=EndpointLimits)

    @property
    def is_loopback(self) -> bool:
        """Returns whether only this machine can reach the address."""
        return is_loopback(self.host)

    @property
    def scheme(self) -> str:
        """Returns the scheme of the endpoint's URL, http or https."""
        return "http" if self.tls_cert is None else "https"


@dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """Holds the options of an endpoint that its engine knows under other names or with other defaults.

    Attributes:
        max_waiting: the most requests that wait while the engine is full; further requests get the status 429.
        default_max_tokens: the length limit of answers to requests that name none; None means what the checkpoint's
            generation settings say, or all that the context and kv_bytes leave (for `fixed_length` 128).
    """

    max_waiting: int = field(
        default=64, metadata=told("requests that wait; further ones get the status 429", "Limits", kind=int)
    )
    default_max_tokens: int | None = field(
        default=None,
        metadata=told(
            "length limit of answers to requests without max_tokens",
            "Limits",
            shown="the checkpoint's own, or what the context leaves",
            unit="TOKENS",
            kind=int,
        ),
    )

    def check(self) -> None:
        """Raises ConfigurationError for an impossible value."""
        positive("max_waiting", self.max_waiting)
        if self.default_max_tokens is not None:
            positive("default_max_tokens", self.default_max_tokens)


class EndpointKeywords(EngineKeywords, StoreKeywords, total=False):
    """Gives the options of an endpoint to type checkers, as keyword arguments."""

    max_waiting: int
    default_max_tokens: int | None


OPTION_KINDS = (EndpointOptions, EngineOptions, StoreOptions)
"""The dataclasses of the options of an endpoint."""


class GivenOptions(NamedTuple):
    """Holds an endpoint's own options, and those of its engine and of its store of adapters that were given."""

    own: EndpointOptions
    engine: dict[str, Any]
    store: dict[str, Any]


def options_given(adapters: object, given: Mapping[str, Any]) -> GivenOptions:
    """Splits the options of an endpoint, and checks them before anything is loaded.

    Args:
        adapters: the folder of adapters; None if there is none.
        given: the options, by name.

    Raises:
        ConfigurationError: a value is impossible, or has no effect since there are no adapters.
        TypeError: there is no such option; the text names the nearest one.
    """
    of_endpoint, engine, store = split_keywords(given, *OPTION_KINDS, method="Endpoint")
    own = EndpointOptions(**of_endpoint)
    own.check()
    EngineOptions(**engine).check()
    check_store_early(adapters, store)
    return GivenOptions(own, engine, store)


def check_may_listen(settings: EndpointSettings, is_verified: bool) -> None:
    """Checks that an endpoint with these settings may start.

    Raises:
        ConfigurationError: the endpoint may not start; the text says what is missing.
    """
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise ConfigurationError("TLS takes both --tls-cert and --tls-key")
    if settings.is_loopback:
        if not is_verified and not settings.unverified:
            raise ConfigurationError(
                "replies of the provider are not verified: give --verify, or --unverified to serve all the same"
            )
        return
    missing = [
        name
        for name, is_there in (
            ("TLS (--tls-cert, --tls-key)", settings.tls_cert is not None),
            ("a key (--api-key-file)", settings.is_own_key),
            ("a verified provider (--verify)", is_verified),
        )
        if not is_there
    ]
    if missing:
        raise ConfigurationError(f"to listen beyond this machine, {settings.host} needs {', '.join(missing)}")


def check_certificate(settings: EndpointSettings) -> None:
    """Raises ConfigurationError if the certificate and the key are damaged or do not belong together. A key with a
    password is not looked at: the user is asked for it when the server starts."""
    if settings.tls_cert is None:
        return
    asked: list[bool] = []

    def password() -> str:
        asked.append(True)
        return ""

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key, password)
    except (OSError, ValueError):  # `from None`: the cause is about a secret; ssl.SSLError is an OSError
        if not asked:
            raise ConfigurationError(
                f"--tls-cert {settings.tls_cert} and --tls-key {settings.tls_key} were expected to be a certificate "
                "chain and its private key, both in PEM"
            ) from None


def error_scale(sigma: float) -> float:
    """Returns how many times larger a mask's error is than that of the default parameters, at least 1."""
    return max(1.0, sigma / NOMINAL_SIGMA)


def steps_text(sigma: float) -> str:
    """Returns the smallest and the largest step that may be chosen, such as "0.25 to 16"."""
    return f"{_LEAST_STEP * error_scale(sigma):g} to {_MOST_STEP * error_scale(sigma):g}"


def check_release_step(step: float, sigma: float | None) -> None:
    """Checks the step to which released numbers are rounded.

    Args:
        step: the step.
        sigma: the standard deviation of the lattice mask's error, with that of rounding, in units of encoded rows; None
            if it is not known yet, so that only a step is refused which no mask allows.

    Raises:
        ConfigurationError: the step is too small or too large for the mask's parameters.
    """
    known = NOMINAL_SIGMA if sigma is None else sigma
    scale, most = error_scale(known), math.inf if sigma is None else _MOST_STEP * error_scale(known)
    if not _LEAST_STEP * scale <= step <= most or step == math.inf:  # a NaN fails this too
        raise ConfigurationError(
            f"--release-values is a step from {steps_text(known)} with the parameters of this mask, got {step:g}"
            + ("; precision='exact' may allow smaller ones" if scale > 1.0 else "")
        )


def new_key() -> str:
    """Returns a new key that holds 256 random bits from the operating system."""
    return f"sk-veilbase-{secrets.token_urlsafe(32)}"


def read_key(path: Path) -> str:
    """Returns the key in a file.

    Raises:
        ConfigurationError: the file cannot be read, is open to other users, or holds no key of 16 to 512 visible ASCII
            characters.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_bytes()[:1024].decode("ascii", "replace").strip()
    except OSError as exc:
        if isinstance(exc, FileNotFoundError):
            raise ConfigurationError(f"there is no file {path} (--api-key-file)") from exc
        raise ConfigurationError(f"{path} cannot be read: {exc.strerror}") from exc
    if mode & 0o077:
        raise ConfigurationError(f"{path} can be read by other users: chmod 600 it")
    if _KEY.fullmatch(text) is None:
        raise ConfigurationError(f"{path} was expected to hold one key of 16 to 512 visible ASCII characters")
    return text


def bound(settings: EndpointSettings, make: Callable[[int, int, int], _Socket]) -> _Socket:
    """Returns a socket that is bound to the address of the settings.

    Args:
        settings: the endpoint's host and port.
        make: makes the socket of a family, a kind and a protocol.

    Raises:
        ConfigurationError: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = make(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except BaseException:
            made.close()
            raise
        return made
    except (OSError, OverflowError) as exc:
        reason = getattr(exc, "strerror", None) or "no such port"
        raise ConfigurationError(f"{settings.host} port {settings.port} cannot be listened to: {reason}") from exc
