"""Records the results of functions, the sessions that clients open, and the requests that they send, by wrapping
functions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from wire.frame import Call
from wire.payload import Payload
from wire.transport.connection import Pending
from wire.transport.inproc import InprocConnection

if TYPE_CHECKING:
    from tenant_sdk.session import Session


def results_of(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Returns a list to which every further result of the function `owner.name` is added."""
    results: list[Any] = []
    function = getattr(owner, name)

    def spy(*arguments: Any, **options: Any) -> Any:
        results.append(function(*arguments, **options))
        return results[-1]

    monkeypatch.setattr(owner, name, spy)
    return results


def opened_sessions(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """Returns a list to which the session of every client is added when the client opens it."""
    import tenant_sdk.client  # loads transformers, which most tests that import this file do not need

    return results_of(monkeypatch, tenant_sdk.client, "open_session")


def before_requests(monkeypatch: pytest.MonkeyPatch, act: Callable[[Call, Payload], object]) -> None:
    """Makes `act` run for each request to an `inproc:` provider, before the provider gets the request.

    If `act` raises an error, the caller gets this error in place of a reply.
    """
    submit = InprocConnection.submit

    def watched(connection: InprocConnection, call: Call, payload: Payload, *others: Any) -> Pending:
        act(call, payload)
        return submit(connection, call, payload, *others)

    monkeypatch.setattr(InprocConnection, "submit", watched)


def mask_makers() -> set[threading.Thread]:
    """Returns this process's threads that make masks ahead of use, for all clients together."""
    return {thread for thread in threading.enumerate() if thread.name == "veilbase-masks"}
