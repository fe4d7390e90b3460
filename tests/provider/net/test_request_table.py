"""Tests that a request takes its place and its tenant's quota together, and gives both back exactly once, whatever ends
the request."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from provider.engine.request import Request
from provider.net.admission import Admission, TenantAdmission
from provider.net.requests import RequestTable
from provider.schedule.quota import TenantLimits
from provider.schedule.ticket import DECODE_IN_FLIGHT, DECODE_ROWS, RequestClass
from wire.errors import LimitExceeded, NotPermitted, QuotaExceeded, Unavailable, VeilbaseError
from wire.frame import Arithmetic, Call, Direction, FrameType, Header

FORWARD = Call(0, Direction.FORWARD, Arithmetic.RING)
BACKWARD = Call(0, Direction.BACKWARD, Arithmetic.RING)
COLS, REPLY_COLS, ROW_BYTES = 3, 5, 4 * (3 + 5)
NOW = 1000.0


class Stream:
    """Holds a table with its tenant's quota, and the requests that were cancelled."""

    def __init__(self, limits: TenantLimits | None = None, max_bytes: int = 100 * ROW_BYTES, most: int = 10) -> None:
        self.admission: TenantAdmission = Admission({"acme": limits or TenantLimits()}).of("acme")
        self.cancelled: list[Request] = []
        self.table = RequestTable(max_bytes, self.admission, self.cancelled.append, most)

    def request(self, number: int, rows: int = 1, call: Call = FORWARD, expires_at: float = NOW + 30) -> Request:
        header = Header(FrameType.REQUEST, number, call, rows, COLS, 0, 4 * rows * COLS, 30_000)
        request_class = self.table.class_of(header, NOW)
        return Request("acme", header, REPLY_COLS, request_class, expires_at, lambda request, outcome: None)

    def admit(self, number: int, rows: int = 1, call: Call = FORWARD, expires_at: float = NOW + 30) -> Request:
        request = self.request(number, rows, call, expires_at)
        self.table.admit(request.header, request.request_class, request.held_bytes, NOW, request)
        return request

    def admit_row(self, number: int) -> Request:
        """Admits a single row that is left out of the table."""
        request = self.request(number)
        self.table.admit(request.header, request.request_class, request.held_bytes, NOW, None)
        return request

    def held(self) -> tuple[int, int, int, int, int]:
        """Returns the requests and bytes in the table, and the rows, bytes and decode requests of the quota."""
        return (*self.table.in_flight(), *self.admission.in_flight(), self.admission.num_decode)


NOTHING = (0, 0, 0, 0, 0)


@pytest.fixture
def stream() -> Stream:
    return Stream()


def test_a_request_takes_its_place_and_its_quota(stream: Stream) -> None:
    request = stream.admit(7, rows=2)
    assert stream.held() == (1, 2 * ROW_BYTES, 2, 2 * ROW_BYTES, 1)
    assert stream.table.get(7) is request
    assert stream.table.has(request)
    assert not stream.table.is_idle
    assert stream.table.forget(7)
    assert stream.held() == NOTHING
    assert stream.table.get(7) is None
    assert not stream.table.has(request)
    assert stream.table.is_idle


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        (TenantLimits(max_rows_in_flight=4), QuotaExceeded),
        (TenantLimits(max_request_rows=2), LimitExceeded),
        (TenantLimits(classes=frozenset({RequestClass.PREFILL})), NotPermitted),
    ],
)
def test_what_the_quota_refuses_takes_nothing(limits: TenantLimits, error: type[VeilbaseError]) -> None:
    stream = Stream(limits)
    if error is QuotaExceeded:
        stream.admit(1, rows=2)
    before = stream.held()
    with pytest.raises(error):
        stream.admit(2, rows=3)
    assert stream.held() == before
    assert stream.table.get(2) is None


def test_bytes_and_requests_of_a_stream_are_bounded() -> None:
    stream = Stream(max_bytes=10 * ROW_BYTES, most=3)
    stream.admit(1, rows=9)
    with pytest.raises(QuotaExceeded) as caught:
        stream.admit(2, rows=2)
    assert caught.value.retry_s > 0
    stream.admit(2, rows=1)
    stream.table.forget(1)
    stream.admit(3)
    stream.admit(4)
    with pytest.raises(QuotaExceeded):
        stream.admit(5)
    assert stream.held()[:2] == (3, 3 * ROW_BYTES)


def test_forgetting_drops_the_reply_and_takes_the_request_out_of_the_queue_once(stream: Stream) -> None:
    request = stream.admit(1)
    request.reply = torch.zeros(1, REPLY_COLS)
    request.complete(torch.zeros(1, COLS))
    done: list[str] = []
    assert stream.table.forget(1, then=lambda: done.append("first"))
    assert request.reply is None
    assert stream.cancelled == [request]
    assert not stream.table.forget(1, then=lambda: done.append("second"))
    assert (done, stream.cancelled, stream.held()) == (["first"], [request], NOTHING)


def test_a_request_of_which_chunks_are_missing_is_in_no_queue(stream: Stream) -> None:
    stream.admit(1)
    stream.table.forget(1)
    assert stream.cancelled == []


def test_a_request_that_the_scheduler_demotes_gives_back_the_quota_it_took(stream: Stream) -> None:
    request = stream.admit(1)
    request.complete(torch.zeros(1, COLS))
    request.ticket.request_class = RequestClass.PREFILL  # as `Decoders.came` does if the tenant floods
    assert request.request_class is RequestClass.DECODE
    stream.table.forget(1)
    assert stream.held() == NOTHING


def test_nobody_finds_a_request_gone_before_what_was_left_in_its_place(stream: Stream) -> None:
    """The table is idle only after `then`, which queues a request's last frame, has ended. Otherwise the sending thread
    could conclude that all requests have ended, and miss this frame."""
    stream.admit(1)
    leaving, leave, order = threading.Event(), threading.Event(), []

    def then() -> None:
        leaving.set()
        leave.wait(60)
        order.append("left")

    def ask() -> None:
        while not stream.table.is_idle:
            pass
        order.append("found idle")

    threads = [
        threading.Thread(target=lambda: stream.table.forget(1, then), daemon=True),
        threading.Thread(target=ask, daemon=True),
    ]
    threads[0].start()
    assert leaving.wait(60)
    threads[1].start()
    threads[1].join(0.1)  # gives a wrong table time to fail
    leave.set()
    for thread in threads:
        thread.join(60)
    assert order == ["left", "found idle"]


def test_another_request_of_the_same_id_is_another(stream: Stream) -> None:
    first = stream.admit(1)
    stream.table.forget(1)
    second = stream.admit(1)
    assert not stream.table.has(first)
    assert stream.table.has(second)


def test_deadlines(stream: Stream) -> None:
    stream.admit(1, expires_at=NOW + 1)
    stream.admit(2, expires_at=NOW + 2)
    assert stream.table.expired(NOW + 0.5) == []
    assert stream.table.expired(NOW + 1) == [1]
    assert stream.table.expired(NOW + 3) == [1, 2]
    assert stream.held()[0] == 2  # it only tells


def test_what_lacks_chunks_is_forgotten_alone(stream: Stream) -> None:
    stream.admit(1)
    stream.admit(2).assembler = None  # all chunks were received
    stream.table.forget_unfinished()
    assert (stream.table.get(1), stream.held()[0]) == (None, 1)


def test_nothing_is_admitted_after_the_end(stream: Stream) -> None:
    for number in range(1, 4):
        stream.admit(number)
    stream.table.close()
    assert stream.table.is_closed
    assert stream.held() == NOTHING
    for admit in (stream.admit, stream.admit_row):
        with pytest.raises(Unavailable):
            admit(4)
    stream.table.close()
    assert stream.held() == NOTHING
    assert stream.table.is_idle


def test_a_row_without_a_place_is_in_flight_until_it_ends(stream: Stream) -> None:
    row = stream.admit_row(1)
    assert stream.held() == (0, 0, 1, ROW_BYTES, 1)
    assert stream.table.get(1) is None
    assert not stream.table.is_idle  # a drain must wait for it
    stream.table.row_ended(row.request_class, row.held_bytes, is_kept=False)
    assert stream.held() == NOTHING
    assert stream.table.is_idle


def test_a_row_that_is_queued_gets_a_place_then(stream: Stream) -> None:
    row = stream.admit_row(1)
    assert stream.table.keep_row(row)
    stream.table.row_ended(row.request_class, row.held_bytes, is_kept=True)
    assert stream.held() == (1, ROW_BYTES, 1, ROW_BYTES, 1)
    stream.table.forget(1)
    assert stream.held() == NOTHING


def test_a_row_whose_stream_ended_gets_no_place(stream: Stream) -> None:
    row = stream.admit_row(1)
    stream.table.close()
    assert not stream.table.keep_row(row)
    stream.table.row_ended(row.request_class, row.held_bytes, is_kept=False)
    assert stream.held() == NOTHING


def test_what_a_request_counts_as_depends_on_what_is_in_flight(stream: Stream) -> None:
    classes = [stream.admit(number).request_class for number in range(1, DECODE_IN_FLIGHT + 2)]
    assert classes == [RequestClass.DECODE] * DECODE_IN_FLIGHT + [RequestClass.PREFILL]
    assert stream.request(9, rows=DECODE_ROWS + 1).request_class is RequestClass.PREFILL
    assert stream.admit(9, call=BACKWARD).request_class is RequestClass.FINETUNE
    assert stream.request(10, rows=DECODE_ROWS + 1).request_class is RequestClass.FINETUNE


def test_a_gradient_that_is_refused_does_not_count_as_training() -> None:
    stream = Stream(most=1)
    stream.admit(1)
    with pytest.raises(QuotaExceeded):
        stream.admit(2, call=BACKWARD)
    assert not stream.admission.is_training(NOW)


def test_threads_that_admit_forget_and_close_leave_nothing() -> None:
    stream = Stream(max_bytes=1 << 30, most=1 << 14)
    begun = threading.Barrier(4)

    def admit() -> None:
        begun.wait()
        for number in range(1, 3000):
            try:
                stream.admit(number)
            except Unavailable:
                return

    def forget() -> None:
        begun.wait()
        until = time.monotonic() + 60
        while not stream.table.is_closed and time.monotonic() < until:
            for number in stream.table.expired(NOW + 60):
                stream.table.forget(number)

    def close() -> None:
        begun.wait()
        while stream.table.get(1000) is None and admitting.is_alive():
            pass
        stream.table.close()

    admitting = threading.Thread(target=admit)
    threads = [admitting, threading.Thread(target=forget), threading.Thread(target=forget)]
    threads.append(threading.Thread(target=close))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert stream.table.is_closed
    assert stream.held() == NOTHING
