"""Tests that the receiving thread itself computes a single decode row (the short way): its counts, its quota, and that
nothing is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from provider.engine.executor import Executor
from provider.engine.profile import make_scheduler
from provider.engine.replica import Here, RowProduct
from provider.model.served_model import ServedModel
from provider.net.admission import Admission
from provider.net.session import Session
from provider.operations.metrics import Meter
from provider.operations.usage import CLASSES, UsageCounter
from provider.schedule.fairness import Policy
from provider.schedule.quota import TenantLimits
from tests.support.compiled_kernels import needs_products
from tests.support.ring_products import CALL, COLS, REPLY_COLS, ring_rows
from tests.support.waiting import comes
from wire import frame
from wire.errors import InvalidTensor, WireCode
from wire.frame import Arithmetic, Call, Direction, FrameType, Header, Purpose
from wire.limits import Limits
from wire.ring import kernels
from wire.ring.widths import rounded

pytestmark = needs_products


class Way:
    """Holds one session and its executor. `before` is called before each product of the receiving thread, and
    `before_long` before each product of the executor."""

    def __init__(self, served_model: ServedModel, told: bool = False) -> None:
        self.served_model, self.before = served_model, lambda: None  # type: tuple[ServedModel, Callable[[], None]]
        self.before_long: Callable[[], None] = lambda: None
        self.num_short = self.num_long = 0
        self.told: list[tuple[object, ...]] = []
        here = Here(self._product, row_product=self._row_product)
        scheduler = make_scheduler(served_model.served, Policy(max_wait_s=0.0), profiled=False)
        self.meter = Meter()
        completed = (lambda *what: self.told.append(what)) if told else None
        self.executor = Executor([here], scheduler, completed, self.meter)
        self.admission, self.usage = Admission({"acme": TenantLimits(max_rows_in_flight=50)}), UsageCounter(CLASSES)
        self.session = Session(
            "acme", Limits(), self.admission.of("acme"), self.usage, served_model.check, self.executor, lambda: None
        )
        self.session.receive(frame.hello(FrameType.HELLO))
        assert self.session.next_frame()
        self._numbers = iter(range(1, 1000))

    def _product(self, call: Call, rows: frame.Rows) -> torch.Tensor:
        self.num_long += 1
        self.before_long()
        return self.served_model.compute(call, rows)

    def _row_product(self, call: Call) -> RowProduct | None:
        multiply = self.served_model.row_product(call)

        def work(row: memoryview, reply: memoryview) -> None:
            assert multiply is not None
            self.num_short += 1
            self.before()
            multiply(row, reply)

        return None if multiply is None else work

    def send(self, rows: torch.Tensor, call: Call = CALL) -> int:
        number = next(self._numbers)
        data = frame.rows_bytes(rows, call.bits)
        header = Header(FrameType.REQUEST, number, call, *rows.shape, 0, len(data), 30_000)
        (message,) = frame.frames(header, data)
        self.session.receive(memoryview(bytearray(message)))  # the form in which the tensor port hands it in
        return number

    def answer(self) -> tuple[Header, memoryview]:
        message = self.session.next_frame()
        assert message is not None
        return frame.parse(message)

    @property
    def rows_in_flight(self) -> int:
        return self.admission.of("acme").in_flight().num_rows

    @property
    def holds_nothing(self) -> bool:
        admission, status = self.admission.of("acme"), self.session.status()
        held = (*admission.in_flight(), admission.num_decode, status.num_requests, status.held_bytes)
        return held == (0, 0, 0, 0, 0) and status.is_idle


@pytest.fixture
def way(tiny_served_model: ServedModel) -> Iterator[Way]:
    made = Way(tiny_served_model)
    yield made
    made.executor.close()


def test_the_reply_and_what_is_counted(way: Way) -> None:
    for count in range(1, 6):
        rows = ring_rows(1)
        number = way.send(rows)
        header, payload = way.answer()
        assert (header.kind, header.request_id, header.call) == (FrameType.REPLY, number, CALL)
        assert (header.rows, header.cols, header.offset) == (1, REPLY_COLS, 0)
        assert torch.equal(frame.tensor(header, payload), way.served_model.compute(CALL, rows))
        assert (way.num_short, way.num_long) == (count, 0)
        assert way.holds_nothing
    total = way.usage.total()
    assert (total.requests["decode"], total.rows["decode"]) == (5, 5)
    assert (total.bytes_up, total.bytes_down) == (5 * 4 * COLS, 5 * 4 * REPLY_COLS)
    assert way.meter.snapshot()[0] == 5


@pytest.mark.parametrize(("bits", "reply_bits"), [(24, 24), (26, 26), (28, 28), (26, 16), (32, 16)])
def test_a_packed_row_and_its_packed_reply(way: Way, bits: int, reply_bits: int) -> None:
    call = replace(CALL, bits=bits, reply_bits=reply_bits)
    rows = rounded(ring_rows(1), bits)
    number = way.send(rows, call)
    header, payload = way.answer()
    assert (header.kind, header.request_id, header.call) == (FrameType.REPLY, number, call)
    assert torch.equal(frame.tensor(header, payload), rounded(way.served_model.compute(CALL, rows), reply_bits))
    assert (way.num_short, way.num_long) == (1, 0)
    assert way.holds_nothing


def test_a_packed_row_that_is_refused_fails_alone(way: Way) -> None:
    """Rows of this model end at a whole byte, so what `OneRow` refuses is imitated."""

    def refuse() -> None:
        raise InvalidTensor(kernels.NOT_CLEAN)

    call, way.before = replace(CALL, bits=26, reply_bits=26), refuse
    number = way.send(rounded(ring_rows(1), 26), call)
    header, _ = way.answer()
    assert (header.kind, header.request_id, header.code) == (FrameType.ERROR, number, WireCode.INVALID_TENSOR)
    assert way.holds_nothing
    way.before = lambda: None
    way.send(rounded(ring_rows(1), 26), call)
    assert way.answer()[0].kind is FrameType.REPLY


@pytest.mark.parametrize(
    "call",
    [
        Call(0, Direction.FORWARD, Arithmetic.FLOAT),
        Call(0, Direction.BACKWARD, Arithmetic.RING),
    ],
)
def test_what_has_no_short_way_goes_the_long_one(way: Way, call: Call) -> None:
    cols = COLS if call.direction is Direction.FORWARD else REPLY_COLS
    rows = torch.zeros(1, cols, dtype=frame.DTYPES[call.arithmetic])
    way.send(rows, call)
    while (message := way.session.next_frame()) is None:
        pass
    assert torch.equal(frame.tensor(*frame.parse(message)), way.served_model.compute(call, rows))
    assert (way.num_short, way.num_long) == (0, 1)
    assert way.holds_nothing


def test_the_bias_free_path_of_a_row(way: Way) -> None:
    rows, call = ring_rows(1), Call(0, Direction.FORWARD, Arithmetic.RING, Purpose.EFFECT)
    way.send(rows, call)
    assert torch.equal(frame.tensor(*way.answer()), way.served_model.compute(call, rows))
    assert way.num_short == 1


def test_it_is_in_flight_while_it_is_made(way: Way) -> None:
    seen: list[tuple[int, bool]] = []
    way.before = lambda: seen.append((way.rows_in_flight, way.session.is_idle))
    way.send(ring_rows(1))
    assert seen == [(1, False)]  # a drain must wait for it
    assert way.holds_nothing


def test_a_reply_that_is_not_taken_is_counted(way: Way) -> None:
    """If a tenant sends requests and does not read the replies, all of them except the first count against its
    quota."""
    way.send(ring_rows(1))
    assert way.holds_nothing
    for count in range(1, 4):
        way.send(ring_rows(1))
        assert (way.num_short, way.rows_in_flight, way.session.status().num_requests) == (1, count, count)
    for _ in range(4):
        way.answer()
    assert way.holds_nothing


def test_a_failure_is_that_requests_alone(way: Way, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("secret 123.456")

    way.before = fail
    number = way.send(ring_rows(1))
    header, _ = way.answer()
    assert (header.kind, header.request_id, header.code) == (FrameType.ERROR, number, WireCode.INTERNAL)
    assert way.holds_nothing
    assert "123.456" not in caplog.text
    way.before = lambda: None
    way.send(ring_rows(1))
    assert way.answer()[0].kind is FrameType.REPLY


@pytest.mark.parametrize("then", ["is made", "fails"])
def test_a_stream_that_ends_meanwhile_holds_nothing(way: Way, then: str) -> None:
    def end() -> None:
        way.session.close()
        if then == "fails":
            raise RuntimeError

    way.before = end
    way.send(ring_rows(1))
    assert way.num_short == 1
    assert way.holds_nothing


def test_a_replica_that_is_busy_goes_the_long_way(way: Way) -> None:
    begun, may_end = threading.Event(), threading.Event()
    way.before_long = lambda: (begun.set(), comes(may_end, "the end of the test"))  # type: ignore[assignment, func-returns-value]
    way.send(ring_rows(30))
    comes(begun, "the product that keeps it busy")
    way.send(ring_rows(1))
    assert (way.num_short, way.rows_in_flight) == (0, 31)
    way.session.close()
    assert way.holds_nothing
    may_end.set()


def test_a_stream_that_ends_before_the_long_way_holds_nothing(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    def compute_row(*_: object) -> bool:
        way.session.close()
        return False

    monkeypatch.setattr(way.executor, "compute_row", compute_row)
    way.send(ring_rows(1))
    assert way.holds_nothing


def test_whoever_is_to_be_told_of_every_request_is(tiny_served_model: ServedModel) -> None:
    way = Way(tiny_served_model, told=True)
    way.send(ring_rows(1))
    assert way.answer()[0].kind is FrameType.REPLY
    assert (way.num_short, len(way.told)) == (0, 1)
    way.executor.close()


@pytest.mark.parametrize(("cols", "rows"), [(COLS - 1, 1), (COLS, 0)])
def test_other_shapes_are_refused_or_go_the_long_way(way: Way, cols: int, rows: int) -> None:
    way.send(torch.zeros(rows, cols, dtype=torch.int32))
    way.session.next_frame()
    assert way.num_short == 0
    assert way.holds_nothing


def test_a_reply_of_more_than_a_chunk_goes_the_longer_way(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the reply to a single row is larger than a chunk, the executor computes it, because the receiving thread can
    send only one frame, and a frame carries at most a chunk (wire/SPEC.md, section 3)."""
    monkeypatch.setattr("provider.net.session.CHUNK_BYTES", 4 * REPLY_COLS - 1)
    rows = ring_rows(1)
    way.send(rows)
    assert (way.num_short, way.num_long) == (0, 1)
    header, payload = way.answer()
    assert torch.equal(frame.tensor(header, payload), way.served_model.compute(CALL, rows))
    monkeypatch.undo()
    way.send(rows)
    assert (way.num_short, way.num_long) == (1, 1)


def test_no_memory_for_a_reply_leaves_nothing_held(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(size: int) -> bytearray:
        raise MemoryError

    monkeypatch.setattr("provider.net.session.bytearray", none_left, raising=False)
    message = memoryview(bytearray(next(iter(_messages(ring_rows(1))))))
    assert way.session.receive(message) is False
    assert way.answer()[0].code == WireCode.INTERNAL
    assert way.holds_nothing


def _messages(rows: torch.Tensor) -> Iterator[bytes | memoryview]:
    header = Header(FrameType.REQUEST, 1, CALL, *rows.shape, 0, 4 * rows.numel(), 30_000)
    return iter(frame.frames(header, frame.tensor_bytes(rows)))
