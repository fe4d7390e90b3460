"""Tests the order of a request's ends on a stream with a window: its reply, its deadline, a cancel and the stream's."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from provider.engine.request import Request
from provider.net.admission import Admission
from provider.net.session import Session
from provider.net.windows import Window
from provider.operations.usage import CLASSES, UsageCounter
from provider.schedule.quota import TenantLimits
from tests.support.cuda import UNIT, stand_in
from tests.support.executors import Desk
from wire import frame
from wire.errors import RemoteFault, WireCode
from wire.frame import IN_WINDOW, Arithmetic, Call, Direction, FrameType, Header
from wire.gpu_window.memory import Area, Driver, allocate
from wire.limits import Limits

CALL = Call(0, Direction.FORWARD, Arithmetic.RING)
COLS, REPLY_COLS, ROWS = 8, 5, 20
REPLY_AT = 4096


class Stream:
    """Holds a greeted session with a window."""

    def __init__(self) -> None:
        self.memory, descriptor = allocate(Driver(0, stand_in().library), torch.device("cpu"), UNIT)
        os.close(descriptor)
        self.desk, self.admission = Desk(), Admission({"acme": TenantLimits()}).of("acme")
        self.usage, self.window = UsageCounter(CLASSES), Window(self.memory)
        limits = Limits(max_rows=64, max_tensor_bytes=1 << 20, max_in_flight_bytes=1 << 20)
        self.session = Session(
            "acme", limits, self.admission, self.usage, lambda call, cols: REPLY_COLS, self.desk, lambda: None,
            window=self.window,
        )  # fmt: skip
        self.session.receive(frame.hello(FrameType.HELLO))
        self.frames()

    def ask(self, number: int, rows: int = ROWS) -> Request:
        header = Header(FrameType.REQUEST, number, CALL, rows, COLS, 0, rows * COLS * 4, 30_000, IN_WINDOW)
        assert self.session.receive(header.pack() + Area(0, REPLY_AT).pack())
        return self.desk.requests[-1]

    def frames(self) -> list[tuple[FrameType, int, int]]:
        found = []
        while (message := self.session.next_frame()) is not None:
            header, payload = frame.parse(message)
            assert not len(payload) or header.kind is FrameType.WELCOME
            found.append((header.kind, header.request_id, header.code))
        return found

    def written(self) -> list[int]:
        """Returns the numbers that are in the reply's place."""
        return self.memory.matrix(REPLY_AT, ROWS, REPLY_COLS).unique().tolist()


def reply_of(number: int) -> torch.Tensor:
    return torch.full((ROWS, REPLY_COLS), number, dtype=torch.int32)


@pytest.fixture
def stream() -> Iterator[Stream]:
    made = Stream()
    yield made
    made.session.close()
    assert made.admission.in_flight() == (0, 0)


def test_a_reply_is_written_before_it_is_said(stream: Stream) -> None:
    request = stream.ask(1)
    stream.memory.matrix(0, ROWS, COLS).fill_(9)
    assert request.rows is not None
    assert not isinstance(request.rows, bytes)
    assert request.rows.unique().tolist() == [9], "rows are read in the window"  # type: ignore[union-attr]
    assert stream.frames() == []
    request.done(reply_of(6))
    assert stream.written() == [6]
    assert stream.frames() == [(FrameType.REPLY, 1, IN_WINDOW)]
    assert stream.session.status().num_requests == 0
    assert stream.admission.in_flight() == (0, 0)


def test_one_row_takes_no_short_way(stream: Stream) -> None:
    """A window's row is on the device, where the thread that reads would wait for a large product."""
    stream.desk.here = reply_of(6)
    request = stream.ask(1, rows=1)
    assert (request.ticket.num_rows, stream.desk.num_rows) == (1, 0)


def test_nothing_is_written_for_a_request_that_was_cancelled(stream: Stream) -> None:
    request = stream.ask(1)
    stream.session.receive(Header(FrameType.CANCEL, 1).pack())
    request.done(reply_of(6))
    assert stream.written() == [0]
    assert stream.frames() == []


def test_a_request_that_has_expired_gets_one_answer(stream: Stream) -> None:
    request = stream.ask(1)
    stream.session.sweep(time.monotonic() + 60)
    request.done(reply_of(6))
    assert stream.frames() == [(FrameType.ERROR, 1, WireCode.DEADLINE)]
    assert stream.written() == [0]


def test_a_request_that_expires_while_its_reply_is_written(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tenant gets one answer, the error, and does not use the place again."""
    request, put = stream.ask(1), stream.window.put

    def put_late(*given: Any) -> None:
        stream.session.sweep(time.monotonic() + 60)
        put(*given)

    monkeypatch.setattr(stream.window, "put", put_late)
    request.done(reply_of(6))
    assert stream.frames() == [(FrameType.ERROR, 1, WireCode.DEADLINE)]


def test_a_reply_that_is_read_in_the_window_and_cancelled_counts(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, put = stream.ask(1), stream.window.put

    def put_and_cancel(*given: Any) -> None:
        put(*given)
        stream.session.receive(Header(FrameType.CANCEL, 1).pack())

    monkeypatch.setattr(stream.window, "put", put_and_cancel)
    request.done(reply_of(6))
    assert (stream.written(), stream.frames()) == ([6], [])
    assert sum(stream.usage.total().requests.values()) == 1


def test_an_error_of_the_product(stream: Stream) -> None:
    stream.ask(1).done(RemoteFault("x"))
    assert stream.frames() == [(FrameType.ERROR, 1, WireCode.INTERNAL)]
    assert stream.written() == [0]


def test_a_device_that_is_lost_while_a_reply_is_written(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise RuntimeError("CUDA error: secret number 123")

    monkeypatch.setattr(stream.window, "put", fail)
    stream.ask(1).done(reply_of(6))
    assert stream.frames() == [(FrameType.ERROR, 1, WireCode.INTERNAL)]
    assert stream.ask(2).ticket.num_rows == ROWS, "the stream goes on"


def test_the_last_reply_is_said_after_the_tenants_input_has_ended(stream: Stream) -> None:
    request = stream.ask(1)
    stream.session.end_input()
    assert stream.frames() == []
    assert not stream.session.is_over
    request.done(reply_of(6))
    assert stream.frames() == [(FrameType.REPLY, 1, IN_WINDOW)]
    assert stream.session.is_over


def test_a_number_in_flight_cannot_be_used_again(stream: Stream) -> None:
    stream.ask(1)
    header = Header(FrameType.REQUEST, 1, CALL, ROWS, COLS, 0, ROWS * COLS * 4, 30_000, IN_WINDOW)
    assert not stream.session.receive(header.pack() + Area(0, REPLY_AT).pack())
    assert stream.frames() == [(FrameType.ERROR, 0, WireCode.MALFORMED)]


def test_rows_stay_mapped_until_the_last_product_and_no_longer(stream: Stream) -> None:
    """Neither a request nor a session that somebody still holds keeps the memory; only the rows themselves do. Nothing
    waits for the garbage collector."""
    before, request = stand_in().mapped_bytes, stream.ask(1)
    rows = request.rows
    assert isinstance(rows, torch.Tensor)
    gc.disable()
    try:
        stream.session.close()
        request.end()
        del stream.window, stream.memory
        assert stand_in().mapped_bytes == before, "a product may still read the rows"
        del rows
        assert stand_in().mapped_bytes == before - UNIT
    finally:
        gc.enable()


def test_nothing_is_written_after_the_stream(stream: Stream) -> None:
    """Another stream of the tenant may have the memory by then."""
    request = stream.ask(1)
    stream.window.end()
    request.done(reply_of(6))
    assert stream.written() == [0]
