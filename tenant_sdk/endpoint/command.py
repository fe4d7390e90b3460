"""This module implements the command `tenant serve`, except for the parsing of its options."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.logs import StderrHandler
from tenant_sdk.endpoint.settings import (
    EndpointSettings,
    bound,
    check_certificate,
    check_may_listen,
    check_release_step,
    new_key,
    read_key,
)
from wire.errors import ConfigurationError, VeilbaseError, VerificationFailed, printable

if TYPE_CHECKING:
    from tenant_sdk.endpoint.server import ServedSession

_TOLD_TOKENS, _PROBE_S = 1000, 1.0
"""The tokens of an answer whose cost is told when a server starts, and the most seconds of the probe for that."""
FORGED_EXIT = 3
"""The exit code after a reply of the provider failed its check. A supervisor must then not restart the server."""


def serving_settings(
    *, host: str, port: int, api_key_file: Path | None, tls_cert: Path | None, tls_key: Path | None, unverified: bool,
    release_values: float | None, is_verified: bool, error_sigma: float | None = None,
) -> EndpointSettings:  # fmt: skip
    """Checks the options of the command line and returns them as settings, before anything is loaded. Without a key
    file, the settings get a new key.

    Args:
        host, port, api_key_file, tls_cert, tls_key, unverified, release_values: the options.
        is_verified: whether replies of the provider are verified.
        error_sigma: the standard deviation of the error that the mask leaves; None if it is not known yet.

    Raises:
        ConfigurationError: a file cannot be used, or an endpoint with these settings may not listen.
    """
    for path in (tls_cert, tls_key):
        if path is not None and not path.is_file():
            raise ConfigurationError(f"{path} is not a file")
    if release_values is not None:
        check_release_step(release_values, error_sigma)
    settings = EndpointSettings(
        host, port, "" if api_key_file is None else read_key(api_key_file), api_key_file is not None, tls_cert,
        tls_key, unverified, release_values,
    )  # fmt: skip
    check_may_listen(settings, is_verified)
    check_certificate(settings)
    return settings if settings.key else replace(settings, key=new_key())


def check_port(settings: EndpointSettings) -> None:
    """Raises ConfigurationError if nothing can listen on the port now, which would otherwise be found out only after
    the provider was checked."""
    bound(settings, socket.socket).close()


def serve_command(
    client: ServedSession,
    adapters: Path | None,
    settings: EndpointSettings,
    echo: Callable[[str], None],
    **options: Any,
) -> None:
    """Serves until SIGTERM or SIGINT (Ctrl-C), and closes the endpoint before it returns. Prints the privacy in force,
    what 1,000 tokens cost, the URL, and the key if a new one was made.

    Raises:
        SystemExit: a reply failed its check; the code is `FORGED_EXIT`.
        VeilbaseError: the endpoint cannot start, or has ended.
    """
    from tenant_sdk.endpoint.server import Endpoint

    log_requests()

    def ready(url: str) -> None:
        if not settings.is_own_key:
            echo(f"key {settings.key}")
        echo(f"ready {url}")
        sys.stdout.flush()

    endpoint = Endpoint(client, adapters, settings, on_ready=ready, **options)
    endpoint.explain()
    try:
        _say_what_tokens_cost(client)
        # uvicorn ends the server at a signal and then sends itself the same signal again, which by default would end
        # the process before the endpoint is closed
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        endpoint.run()
    except VerificationFailed as exc:
        said = printable(str(exc), one_line=True)
        print(f"tenant: {said}; this server has ended and does not start again by itself", file=sys.stderr)
        raise SystemExit(FORGED_EXIT) from None


def _say_what_tokens_cost(client: ServedSession) -> None:
    """Says on stderr what answers of 1,000 tokens send, receive and take. Raises VerificationFailed if a reply of
    the probe was forged; of any other failure it says so, and the server starts."""
    try:
        length = min(_TOLD_TOKENS, client.context_length - 1)
        line = client.plan_tokens(1, length, -(-_TOLD_TOKENS // length), probe_s=_PROBE_S).line()
    except VerificationFailed:
        raise
    except VeilbaseError as exc:
        line = f"no estimate, since the provider could not be timed: {printable(str(exc), one_line=True)}"
    print(f"tenant: {_TOLD_TOKENS:,} tokens of answers: {line}", file=sys.stderr, flush=True)


def log_requests() -> None:
    """Turns on a log on stderr, with one line for each request: its time, route, status, kind of error and duration."""
    handler = StderrHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("veilbase.endpoint")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
