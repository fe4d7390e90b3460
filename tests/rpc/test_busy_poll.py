"""Tests a tensor port whose two ends poll without sleeping until something happens, instead of for two milliseconds. No
event may be missed."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

import provider.net.service as provider_service
from provider.identity.registry import revoke
from provider.model.served_model import ServedModel
from provider.shards.router import ShardedExecutor
from tests.support.providers import QUICK_S, Provider, service_of
from tests.support.raw_peers import RawStream, RawTls, hear
from tests.support.ring_products import CALL, COLS, ask, assert_served, ring_rows
from tests.support.waiting import WAIT_S, until
from wire import frame
from wire.errors import WireCode
from wire.frame import FrameType, Header
from wire.transport import busy_poll, message_socket
from wire.transport.busy_poll import BusyPoll

ENDLESS_S = 10 * WAIT_S
Found = TypeVar("Found")


class Patient(BusyPoll):
    """Polls also before its first wait."""

    looks = 0
    """The number of polls that were requested."""

    def __init__(self, most_s: float = ENDLESS_S, may_look: Callable[[], bool] = lambda: True) -> None:
        super().__init__(ENDLESS_S, may_look)
        self._was_short = True

    def look(self, has_come: Callable[[], Found], is_likely: bool) -> Found | None:
        busy_poll._looks_until_s = 0.0  # in this test both ends are in one process, and both must poll
        Patient.looks += is_likely
        return super().look(has_come, is_likely)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes both ends poll. This fixture must come before `provider`."""
    monkeypatch.setattr(busy_poll, "is_worthwhile", lambda: True)
    monkeypatch.setattr(message_socket, "BusyPoll", Patient)
    monkeypatch.setattr(provider_service, "BusyPoll", Patient)
    monkeypatch.setattr(provider_service, "SWEEP_S", QUICK_S)
    monkeypatch.setattr(Patient, "looks", 0)


def test_replies_of_any_size_come(patient: None, provider: Provider) -> None:
    connection = provider.connect()
    for count in (1, 1, 300, 1, 4096, 1):
        rows = ring_rows(count)
        assert ask(connection, rows).equal(provider.served_model.compute(CALL, rows))
    assert Patient.looks > 6


def test_a_reply_that_another_thread_made_is_sent(
    patient: None,
    start: Callable[[ServedModel], Provider],
    tiny_served_model: ServedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The provider polls while another thread computes the reply, as if it had not noticed that the core is needed."""
    monkeypatch.setattr(ShardedExecutor, "is_idle", lambda executor: True)
    product, threads = tiny_served_model.compute, set()

    def slow(*arguments: Any) -> Any:
        threads.add(threading.current_thread().name)
        time.sleep(0.05)
        return product(*arguments)

    monkeypatch.setattr(tiny_served_model, "compute", slow)
    connection = start(tiny_served_model).connect()
    rows = ring_rows(300)
    for _ in range(3):
        assert ask(connection, rows).equal(product(CALL, rows))
    assert threads == {"veilbase-compute"}


@pytest.mark.parametrize("whole", [True, False])
def test_who_is_sent_no_reply_is_not_looked_at(
    provider: Provider, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """The provider does not poll for a tenant that sends only CANCEL messages, or single bytes of a record. Otherwise
    such messages, which cost their sender nothing, would keep a core busy."""
    waits: list[bool] = []

    class Noted(BusyPoll):
        def look(self, has_come: Callable[[], Found], is_likely: bool) -> Found | None:
            waits.append(is_likely)

    monkeypatch.setattr(provider_service, "BusyPoll", Noted)
    raw = RawTls(provider, "idle")
    connection = raw.connection
    connection.send(frame.hello(FrameType.HELLO))
    assert hear(connection).kind is FrameType.WELCOME
    cancel = Header(FrameType.CANCEL, 7).pack()
    record = b"" if whole else raw.records(struct.pack("<I", len(cancel)) + cancel)
    for number in range(20):
        seen = len(waits)
        if whole:
            connection.send(cancel)
        else:
            raw.plain.sendall(record[number : number + 1])
        until(lambda seen=seen: len(waits) > seen, "the next wait")  # type: ignore[misc]
    assert not any(waits)
    if whole:
        rows = ring_rows(1)
        request = Header(FrameType.REQUEST, 1, CALL, 1, COLS, 0, 4 * COLS, 30_000)
        connection.send(request.pack() + bytes(frame.tensor_bytes(rows)))
        assert hear(connection).kind is FrameType.REPLY
        until(lambda: any(waits), "a wait after a reply")
    connection.release()


@pytest.mark.parametrize("event", ["stop", "revoke", "leave"])
def test_an_end_is_noticed(patient: None, provider: Provider, event: str) -> None:
    stream = RawStream(provider, "raw")
    stream.send(*stream.request(1, ring_rows(1)))
    assert stream.receive().kind is FrameType.REPLY
    if event == "stop":
        provider.server.stop()
        stream.expect_error(0, WireCode.UNAVAILABLE)
    elif event == "revoke":
        revoke(provider.state, "raw")
        stream.expect_error(0, WireCode.NOT_PERMITTED)
    stream.close()
    until(lambda: not service_of(provider).sessions, "the end of the session")


def test_a_tenant_that_closes_while_it_looks_ends(patient: None, provider: Provider) -> None:
    connection = provider.connect()
    assert_served(connection, provider.served_model)
    began = time.monotonic()
    connection.close()
    until(lambda: not service_of(provider).sessions, "the end of the session")
    assert time.monotonic() - began < WAIT_S
