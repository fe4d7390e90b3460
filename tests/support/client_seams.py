"""What clients open and ask, seen where the SDK passes it on: at the functions that open it, not in a client."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import tenant_sdk.client
from tenant_sdk.session import Session, open_session
from wire.frame import Call
from wire.ring.seeded_rows import Rows
from wire.transport.connection import Pending
from wire.transport.inproc import InprocConnection

TIMEOUT_S = 60.0


def opened_sessions(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """Returns a list to which the session of every client is added when the client opens it."""
    opened: list[Session] = []

    def keeping(*arguments: object) -> Session:
        opened.append(open_session(*arguments))  # type: ignore[arg-type]
        return opened[-1]

    monkeypatch.setattr(tenant_sdk.client, "open_session", keeping)
    return opened


def before_requests(monkeypatch: pytest.MonkeyPatch, act: Callable[[Call, Rows | bytearray], object]) -> None:
    """Has `act` called with each request to any `inproc:` provider, before that gets it.

    What `act` raises, the caller gets in place of a reply.
    """
    submit = InprocConnection.submit

    def watched(connection: InprocConnection, call: Call, rows: Rows | bytearray, *others: Any) -> Pending:
        act(call, rows)
        return submit(connection, call, rows, *others)

    monkeypatch.setattr(InprocConnection, "submit", watched)


def wait_for_mask_makers() -> None:
    """Waits until no thread makes masks any more: their pools are closed, or each meets an error of its own."""
    for thread in threading.enumerate():
        if thread.name == "veilbase-masks":
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a thread still makes masks"
