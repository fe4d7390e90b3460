"""What clients open and ask, seen where the SDK passes it on: at the functions that open it, not in a client."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import tenant_sdk.client
from tenant_sdk.session import Session
from tests.support.spies import results_of
from wire.frame import Call
from wire.payload import Payload
from wire.transport.connection import Pending
from wire.transport.inproc import InprocConnection


def opened_sessions(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """Returns a list to which the session of every client is added when the client opens it."""
    return results_of(monkeypatch, tenant_sdk.client, "open_session")


def before_requests(monkeypatch: pytest.MonkeyPatch, act: Callable[[Call, Payload], object]) -> None:
    """Has `act` called with each request to any `inproc:` provider, before that gets it.

    What `act` raises, the caller gets in place of a reply.
    """
    submit = InprocConnection.submit

    def watched(connection: InprocConnection, call: Call, payload: Payload, *others: Any) -> Pending:
        act(call, payload)
        return submit(connection, call, payload, *others)

    monkeypatch.setattr(InprocConnection, "submit", watched)


def mask_makers() -> set[threading.Thread]:
    """Returns the threads of this process that make masks ahead of use, whichever client has them."""
    return {thread for thread in threading.enumerate() if thread.name == "veilbase-masks"}
