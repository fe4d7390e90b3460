"""Tests a registry that cannot be read, over both ports: open streams go on, no new caller is admitted, and all are
told when to retry."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable

import grpc
import pytest
import torch

import provider.identity.revocations as revocations
import provider.net.service as service_module
from provider.identity.registry import revoke
from provider.identity.revocations import HELD_OVER_S, RETRY_S, RevocationList
from provider.model.served_model import ServedModel
from tests.support.providers import QUICK_S, Fault, Provider, service_of
from tests.support.raw_peers import GrpcLink, RawStream, SocketLink
from tests.support.ring_products import CALL, ask, assert_served, ring_rows
from tests.support.waiting import WAIT_S
from wire import frame
from wire.errors import NotPermitted, Unavailable, WireCode
from wire.frame import FrameType
from wire.limits import RETRY_METADATA
from wire.transport import retry
from wire.transport.grpc_channel import BUNDLE_METHOD, MANIFEST_METHOD, STREAM_METHOD, open_channel, translate_status

RETRY_MS = int(1000 * RETRY_S)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Stops the registry's clock and makes sweeps frequent. This fixture must come before `provider`."""
    clock, make = Clock(), RevocationList.__init__
    monkeypatch.setattr(RevocationList, "__init__", lambda self, state: make(self, state, monotonic=clock))
    monkeypatch.setattr(service_module, "SWEEP_S", QUICK_S)
    return clock


def wait_for_sweeps(provider: Provider) -> None:
    """Waits for two sweeps, since the first may have begun before the call."""
    swept = threading.Semaphore(0)
    service = service_of(provider)
    (session, *_) = service.sessions
    sweep = session.sweep

    def noted(now: float) -> None:
        sweep(now)
        swept.release()

    session.sweep = noted  # type: ignore[method-assign]
    for _ in range(2):
        assert swept.acquire(timeout=WAIT_S)


@pytest.fixture(params=[SocketLink, GrpcLink], ids=["tensor", "grpc"])
def reached(
    request: pytest.FixtureRequest, clock: Clock, start: Callable[..., Provider], tiny_served_model: ServedModel
) -> Provider:
    return start(tiny_served_model, tensor_port=0 if request.param is SocketLink else None)


def test_open_streams_go_on_for_a_minute_and_are_then_told_a_time(
    clock: Clock, reached: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = RawStream(reached)
    fault = Fault(monkeypatch, errno.EMFILE)
    clock.now += HELD_OVER_S - 1
    wait_for_sweeps(reached)
    stream.send(*stream.request(1, ring_rows(3)))
    assert (stream.receive().kind, fault.is_over) == (FrameType.REPLY, False)
    clock.now += 1
    wait_for_sweeps(reached)  # sweeps that end no stream
    for number, num_rows in ((2, 1), (3, 300)):  # one is computed at once, the other is queued
        stream.send(*stream.request(number, ring_rows(num_rows)))
        refusal = stream.receive()
        assert (refusal.kind, refusal.request_id) == (FrameType.ERROR, number)
        assert (WireCode(refusal.code), refusal.deadline_ms) == (WireCode.UNAVAILABLE, RETRY_MS)
    fault.is_over = True
    stream.send(*stream.request(4, ring_rows(3)))
    reply = stream.receive()
    assert (reply.kind, reply.request_id) == (FrameType.REPLY, 4)  # the same stream is still used
    revoke(reached.state, "raw")
    stream.expect_error(0, WireCode.NOT_PERMITTED)
    stream.close()


def test_nobody_new_comes_in(clock: Clock, reached: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = reached.identity()
    stays = RawStream(reached, "stays")
    fault = Fault(monkeypatch, errno.EIO)
    for seconds in (0.0, HELD_OVER_S):
        clock.now += seconds
        with open_channel(reached.url, identity) as channel:
            for method, request in ((MANIFEST_METHOD, b""), (BUNDLE_METHOD, b"config.json")):
                with pytest.raises(grpc.RpcError) as caught:
                    list(channel.unary_stream(method)(request, timeout=WAIT_S))
                assert_told(caught.value)
            with pytest.raises(grpc.RpcError) as caught:
                list(channel.stream_stream(STREAM_METHOD)(iter([frame.hello(FrameType.HELLO)]), timeout=WAIT_S))
            assert_told(caught.value)
        connection = reached.connect()
        with pytest.raises(Unavailable, match="try again in 5 s") as refused:
            connection.manifest()
        assert refused.value.retry_s == RETRY_S
        assert "revoked" not in str(refused.value)
    fault.is_over = True
    assert_served(reached.connect(), reached.served_model)
    stays.close()


def assert_told(exc: grpc.RpcError) -> None:
    assert exc.code() is grpc.StatusCode.UNAVAILABLE
    assert dict(exc.trailing_metadata())[RETRY_METADATA] == str(RETRY_MS)
    assert exc.details() == "cannot tell who is enrolled"


def test_a_new_connection_to_the_tensor_port_is_told_a_time(
    clock: Clock, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider.identity("late")
    Fault(monkeypatch, errno.ENFILE)
    stream = RawStream(provider, "late", greet=False)
    refusal = stream.receive()
    assert (refusal.kind, refusal.request_id) == (FrameType.ERROR, 0)
    assert (WireCode(refusal.code), refusal.deadline_ms) == (WireCode.UNAVAILABLE, RETRY_MS)
    stream.expect_end()
    stream.close()


def test_a_client_waits_and_sends_the_same_bytes_again(
    clock: Clock, reached: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revocations, "RETRY_S", 0.01)
    connection = reached.connect()
    assert_served(connection, reached.served_model)
    fault = Fault(monkeypatch, errno.EMFILE)
    clock.now += HELD_OVER_S
    pauses = []

    def pause(retry_s: float) -> float:
        pauses.append(retry_s)
        fault.is_over = len(pauses) > 2
        return 0.0

    monkeypatch.setattr(retry, "with_jitter", pause)
    rows = ring_rows(3)
    assert torch.equal(ask(connection, rows), reached.served_model.compute(CALL, rows))
    assert len(pauses) == 3


def test_a_malformed_registry_still_counts_as_revoked(
    clock: Clock, reached: Provider, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "provider.identity.revocations")
    stream = RawStream(reached)
    reached.state.tenants_path.write_text("{")
    stream.expect_error(0, WireCode.NOT_PERMITTED)
    with pytest.raises(NotPermitted):
        reached.connect("raw").manifest()
    assert len(caplog.messages) == 1
    stream.close()


class Status(grpc.RpcError):
    def __init__(self, value: object) -> None:
        self._value = value

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return ""

    def trailing_metadata(self) -> list[tuple[str, object]] | None:
        return None if self._value is None else [("other", "7"), (RETRY_METADATA, self._value)]


@pytest.mark.parametrize(
    ("value", "retry_s"),
    [(None, 0), ("", 0), ("5000", 5), ("1", 0.001), ("999999999", 3600), ("9" * 5000, 0), ("-1", 0), ("1e3", 0),
     ("٣", 0), (b"5000", 0)],
)  # fmt: skip
def test_a_time_that_a_provider_names_is_read_with_care(value: object, retry_s: float) -> None:
    exc = translate_status(Status(value))
    assert isinstance(exc, Unavailable)
    assert exc.retry_s == retry_s
    assert "in 0 s" not in str(exc)
