"""Tests the effect of each frame of a tenant: which errors fail one request, and which end the stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from provider.identity.revocations import RegistryUnreadable
from provider.net.admission import Admission
from provider.net.session import HANDSHAKE_S, INLINE_ROWS, SWEEP_S, Session
from provider.operations.usage import CLASSES, UsageCounter
from provider.schedule.quota import TenantLimits
from provider.schedule.ticket import RequestClass
from tests.support.executors import Desk
from tests.support.raw_peers import WRONG_GREETINGS
from tests.support.ring_products import ring_rows
from wire import frame
from wire.errors import InvalidTensor, RemoteFault, UnknownLayer, VeilbaseError, WireCode
from wire.frame import Arithmetic, Call, Direction, FrameType, Header, Purpose
from wire.limits import Limits
from wire.ring.seeded_rows import PACKED_BYTES, SeededRows
from wire.ring.widths import pack, rounded, row_bytes

CALL = Call(0, Direction.FORWARD, Arithmetic.RING)
HINT = Call(0, Direction.FORWARD, Arithmetic.RING, Purpose.HINT)
SHORT = Call(0, Direction.FORWARD, Arithmetic.RING, bits=26, reply_bits=26)
"""Its rows take 10 bytes, and those of its replies 17."""
COLS, REPLY_COLS = 3, 5
LIMITS = Limits(max_rows=64, max_tensor_bytes=1 << 20, max_in_flight_bytes=1 << 20)
HELLO = frame.hello(FrameType.HELLO)


class Stream:
    """Holds a session to which the test hands in frames, and from which it takes frames."""

    def __init__(self, greet: bool = True, limits: TenantLimits | None = None) -> None:
        self.desk, self.usage = Desk(), UsageCounter(CLASSES)
        self.admission = Admission({"acme": limits or TenantLimits()}).of("acme")
        self.refusal: Callable[[], WireCode | None] = lambda: None
        self.hung_up, self.reply_cols = 0, REPLY_COLS
        self.session = Session(
            "acme", LIMITS, self.admission, self.usage, self._check, self.desk, lambda: self.refusal(), self._hang_up
        )
        if greet:
            assert self.session.receive(HELLO)
            assert self.frames() == [(FrameType.WELCOME, 0, frame.PROTOCOL_VERSION)]

    def _hang_up(self) -> None:
        self.hung_up += 1

    def _check(self, call: Call, cols: int) -> int:
        if call.group:
            raise UnknownLayer("no such group")
        if cols != COLS:
            raise InvalidTensor("other columns")
        return self.reply_cols

    def ask(self, number: int, rows: int = 20, **changes: Any) -> bool:
        """Hands in a complete request of zeros."""
        size = 4 * rows * COLS
        fields: dict[str, Any] = {
            "call": CALL,
            "rows": rows,
            "cols": COLS,
            "total_bytes": size,
            "deadline_ms": 30_000,
            **changes,
        }
        header = Header(FrameType.REQUEST, number, **fields)
        return self.session.receive(header.pack() + bytes(size))

    def ask_row(self, number: int) -> bool:
        """Hands in one row in writable memory, as the tensor port does."""
        header = Header(FrameType.REQUEST, number, CALL, 1, COLS, 0, 4 * COLS, 30_000)
        return self.session.receive(memoryview(bytearray(header.pack() + bytes(4 * COLS))))

    def begin(self, number: int, rows: int = 20, deadline_ms: int = 30_000) -> bool:
        """Hands in the first chunk of a request."""
        header = Header(FrameType.REQUEST, number, CALL, rows, COLS, 0, 4 * rows * COLS, deadline_ms)
        return self.session.receive(header.pack() + bytes(4))

    def go_on(self, number: int, offset: int, size: int, rows: int = 20) -> bool:
        """Hands in a later chunk of a request."""
        header = Header(FrameType.REQUEST, number, CALL, rows, COLS, offset, 4 * rows * COLS, 30_000)
        return self.session.receive(header.pack() + bytes(size))

    def frames(self) -> list[tuple[FrameType, int, int]]:
        """Returns the type, request id and error code of each frame that is to be sent now."""
        found = []
        while (message := self.session.next_frame()) is not None:
            header, _ = frame.parse(message)
            found.append((header.kind, header.request_id, header.code))
        return found

    def expect_end(self, code: WireCode) -> None:
        """Checks that the stream has ended for this reason, and holds no request."""
        assert self.frames()[-1] == (FrameType.ERROR, 0, code)
        assert self.session.is_over
        status = self.session.status()
        assert (status.num_requests, status.held_bytes, status.is_closed) == (0, 0, True)
        assert self.admission.in_flight() == (0, 0)

    def expect_only(self, number: int, code: WireCode) -> None:
        """Checks that one request has failed with an error, and that the stream goes on."""
        assert self.frames() == [(FrameType.ERROR, number, code)]
        assert self.admission.in_flight() == (0, 0)
        assert self.ask(1 << 40)
        assert self.session.status().num_requests == 1


@pytest.fixture
def stream() -> Stream:
    return Stream()


# ---- what the operator sees of a refusal ----------------------------------------------------------------------------


def _over_quota(stream: Stream) -> None:
    stream.ask(1, rows=64)
    stream.ask(2, rows=64)


@pytest.mark.parametrize(
    ("limits", "do", "reason", "request_id"),
    [
        ({"max_rows_in_flight": 64}, _over_quota, "it is over its quota", 2),
        ({"max_request_rows": 4}, lambda one: one.ask(1), "a request is larger than its limits", 1),
        ({"classes": ["decode"]}, lambda one: one.ask(1), "its limits do not allow this class of work", 1),
        ({}, lambda one: one.ask(1, cols=4, total_bytes=320), "a tensor has a wrong shape, type or byte count, or", 1),
        ({}, lambda one: one.ask(1, call=Call(9, Direction.FORWARD, Arithmetic.RING)), "it asked for a layer", 1),
        ({}, lambda one: one.ask(1, deadline_ms=0), "a request's deadline has passed", 1),
        ({}, lambda one: (one.session.drain(), one.ask(1)), "the provider is shutting down", 1),
        ({}, lambda one: one.session.receive(b"\x1b[31m no frame"), "its stream has a frame that cannot be read", None),
        ({}, lambda one: one.session.end(WireCode.VERSION), "it speaks another version of the protocol", None),
    ],
)  # fmt: skip
def test_a_refusal_has_a_line_with_the_tenant_and_a_fixed_reason(
    limits: dict[str, Any],
    do: Callable[[Stream], object],
    reason: str,
    request_id: int | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stream = Stream(limits=TenantLimits.model_validate(limits))
    for _ in range(3):
        do(stream)
    (line,) = [one for one in caplog.records if one.getMessage().startswith("refused: ")][:1]
    assert line.getMessage().startswith(f"refused: {reason}")
    assert (vars(line)["tenant"], vars(line)["stream"]) == ("acme", stream.session.stream_id)
    assert vars(line).get("request") == request_id
    assert sum(one.getMessage() == line.getMessage() for one in caplog.records) == 1


# ---- the greeting ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "code"), WRONG_GREETINGS)
def test_another_first_frame_ends_the_stream(first: bytes, code: WireCode) -> None:
    stream = Stream(greet=False)
    assert not stream.session.status().has_greeted
    assert not stream.session.receive(first)
    stream.expect_end(code)


def test_a_tenant_that_never_greets_is_shown_out() -> None:
    stream = Stream(greet=False)
    stream.session.sweep(time.monotonic())
    assert not stream.session.status().is_closed
    stream.session.sweep(time.monotonic() + HANDSHAKE_S)
    stream.expect_end(WireCode.MALFORMED)


# ---- faults of one request ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"deadline_ms": 0}, WireCode.DEADLINE),
        ({"call": Call(1, Direction.FORWARD, Arithmetic.RING)}, WireCode.UNKNOWN_LAYER),
        ({"cols": COLS + 1}, WireCode.INVALID_TENSOR),
        ({"total_bytes": 4 * 20 * COLS + 4}, WireCode.INVALID_TENSOR),
        ({"rows": LIMITS.max_rows + 1}, WireCode.LIMIT),
        ({"code": 1}, WireCode.UNKNOWN_LAYER),  # another model
        ({"call": SHORT}, WireCode.INVALID_TENSOR),  # the bytes of rows of 32 bits
        ({"call": SHORT, "total_bytes": 20 * 15}, WireCode.INVALID_TENSOR),
    ],
)
def test_a_header_that_fails_a_check_answers_its_request_alone(
    stream: Stream, changes: dict[str, Any], code: WireCode
) -> None:
    assert stream.ask(1, **changes)
    stream.expect_only(1, code)
    assert stream.usage.total().errors == {code.name: 1}


def test_a_reply_that_would_be_too_large(stream: Stream) -> None:
    stream.reply_cols = LIMITS.max_tensor_bytes // 80 + 1
    assert stream.ask(1)
    assert stream.frames() == [(FrameType.ERROR, 1, WireCode.LIMIT)]


def test_a_seed_that_does_not_fit_its_header(stream: Stream) -> None:
    header = Header(FrameType.REQUEST, 1, HINT, 20, COLS, 0, PACKED_BYTES, 30_000)
    assert stream.session.receive(header.pack() + SeededRows(bytes(32), 0, 19).pack())
    stream.expect_only(1, WireCode.INVALID_TENSOR)


def test_a_quota_that_is_full() -> None:
    stream = Stream(limits=TenantLimits(max_rows_in_flight=30))
    assert stream.ask(1)
    assert stream.ask(2)
    assert stream.frames() == [(FrameType.ERROR, 2, WireCode.QUOTA)]
    assert stream.session.status().num_requests == 1


def test_a_provider_that_drains_finishes_what_it_has(stream: Stream) -> None:
    assert stream.ask(1)
    stream.session.drain()
    assert stream.session.status().is_draining
    assert stream.ask(2)
    assert stream.frames() == [(FrameType.ERROR, 2, WireCode.UNAVAILABLE)]
    stream.desk.requests[0].done(torch.zeros(20, REPLY_COLS, dtype=torch.int32))
    assert stream.frames() == [(FrameType.REPLY, 1, 0)]
    assert stream.session.is_idle


def test_a_registry_that_cannot_be_read_refuses_requests_and_ends_nothing(stream: Stream) -> None:
    def unreadable() -> None:
        raise RegistryUnreadable

    stream.refusal = unreadable
    assert stream.ask(1)
    assert stream.frames() == [(FrameType.ERROR, 1, WireCode.UNAVAILABLE)]
    stream.session.sweep(time.monotonic())
    assert not stream.session.status().is_closed


@pytest.mark.parametrize("rows", [1, 20])
def test_a_product_that_fails_answers_its_request_alone(stream: Stream, rows: int) -> None:
    stream.desk.here = RemoteFault("broken")
    assert stream.ask(1, rows=rows)
    if rows > INLINE_ROWS:
        stream.desk.requests[0].done(RemoteFault("broken"))
    assert stream.frames() == [(FrameType.ERROR, 1, WireCode.INTERNAL)]
    assert stream.session.status().num_requests == 0
    assert stream.admission.in_flight() == (0, 0)


# ---- faults that end the stream -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        HELLO,
        Header(FrameType.WELCOME).pack(),
        Header(FrameType.REPLY, 1, CALL).pack(),
        Header(FrameType.ERROR, 1).pack(),
    ],
)
def test_frames_that_a_tenant_does_not_send(stream: Stream, message: bytes) -> None:
    stream.ask(1)
    assert not stream.session.receive(message)
    stream.expect_end(WireCode.MALFORMED)


def test_request_id_0_is_the_stream_itself(stream: Stream) -> None:
    assert not stream.ask(0)
    stream.expect_end(WireCode.MALFORMED)


@pytest.mark.parametrize("first", [Stream.begin, Stream.ask])
def test_an_id_in_flight_is_not_used_again(stream: Stream, first: Callable[[Stream, int], bool]) -> None:
    assert first(stream, 1)
    assert not stream.ask(1)
    stream.expect_end(WireCode.MALFORMED)


def test_a_chunk_after_the_last_ends_the_stream(stream: Stream) -> None:
    assert stream.ask(1)
    assert not stream.go_on(1, 236, 4)
    stream.expect_end(WireCode.MALFORMED)


@pytest.mark.parametrize(("offset", "rows"), [(8, 20), (4, 21)])
def test_a_chunk_that_does_not_continue_its_tensor(stream: Stream, offset: int, rows: int) -> None:
    assert stream.begin(1)
    assert not stream.go_on(1, offset, 4, rows)
    stream.expect_end(WireCode.MALFORMED)


def test_a_request_begins_with_its_first_chunk(stream: Stream) -> None:
    assert not stream.go_on(1, 4, 4)
    stream.expect_end(WireCode.MALFORMED)


def test_chunks_of_a_request_that_is_over_are_skipped(stream: Stream) -> None:
    assert stream.begin(5, deadline_ms=0)  # this request is refused
    assert stream.begin(6)
    assert stream.session.receive(Header(FrameType.CANCEL, 6).pack())
    for number in (5, 6, 4):
        assert stream.go_on(number, 4, 4)
    assert stream.frames() == [(FrameType.ERROR, 5, WireCode.DEADLINE)]
    assert not stream.go_on(7, 4, 4)
    stream.expect_end(WireCode.MALFORMED)


@pytest.mark.parametrize("code", [WireCode.NOT_PERMITTED, WireCode.UNAUTHENTICATED])
@pytest.mark.parametrize("by", ["a request", "the sweep"])
def test_a_tenant_that_may_not_go_on_is_told_once(stream: Stream, code: WireCode, by: str) -> None:
    stream.ask(1)
    stream.refusal = lambda: code
    if by == "a request":
        assert not stream.ask(2)
    else:
        stream.session.sweep(time.monotonic())
    stream.expect_end(code)
    assert len(stream.desk.cancelled) == 1


def test_what_nobody_foresaw_ends_the_stream_and_says_nothing_of_it(
    stream: Stream, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("a secret value")

    stream.refusal = fail
    assert not stream.ask(1)
    stream.expect_end(WireCode.INTERNAL)
    assert "RuntimeError" in caplog.text
    assert "a secret value" not in caplog.text


def test_a_sweep_of_a_stream_that_has_ended_hangs_up(stream: Stream) -> None:
    stream.session.close()
    assert stream.hung_up == 0
    stream.session.sweep(time.monotonic())
    assert stream.hung_up == 1


# ---- requests in flight ---------------------------------------------------------------------------------------------


def test_a_request_in_flight_and_what_it_holds(stream: Stream) -> None:
    assert stream.begin(1)
    status = stream.session.status()
    assert (status.num_requests, status.held_bytes, status.is_idle) == (1, 4 * 20 * (COLS + REPLY_COLS), False)
    assert stream.desk.requests == []
    assert stream.go_on(1, 4, 4 * 20 * COLS - 4)
    (request,) = stream.desk.requests
    assert (request.ticket.num_rows, request.ticket.request_class) == (20, RequestClass.PREFILL)
    assert (request.reply_cols, request.tenant, request.held_bytes) == (REPLY_COLS, "acme", status.held_bytes)
    request.done(torch.zeros(20, REPLY_COLS, dtype=torch.int32))
    status = stream.session.status()
    assert (status.num_requests, status.num_waiting, status.is_idle) == (1, 1, False)  # until it is sent
    assert stream.frames() == [(FrameType.REPLY, 1, 0)]
    status = stream.session.status()
    assert (status.num_requests, status.held_bytes, status.num_waiting, status.is_idle) == (0, 0, 0, True)


def test_a_cancel_forgets_its_request_and_needs_none(stream: Stream) -> None:
    stream.ask(1)
    for number in (1, 1, 99):
        assert stream.session.receive(Header(FrameType.CANCEL, number).pack())
    assert stream.desk.cancelled == stream.desk.requests
    assert stream.session.is_idle
    stream.desk.requests[0].done(torch.zeros(20, REPLY_COLS, dtype=torch.int32))  # its product was being computed
    assert stream.frames() == []


def test_a_sweep_answers_what_has_expired(stream: Stream) -> None:
    stream.ask(1, deadline_ms=1000)
    stream.ask(2, deadline_ms=60_000)
    stream.session.sweep(time.monotonic())
    assert stream.frames() == []
    stream.session.sweep(time.monotonic() + 2)
    assert stream.frames() == [(FrameType.ERROR, 1, WireCode.DEADLINE)]
    assert stream.session.status().num_requests == 1


def test_a_request_sweeps_where_no_sweep_came_lately(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    stream.ask(1, deadline_ms=1)
    later = time.monotonic() + SWEEP_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    stream.ask(2)
    assert stream.frames() == [(FrameType.ERROR, 1, WireCode.DEADLINE)]


def test_the_end_of_the_input_leaves_what_is_whole(stream: Stream) -> None:
    stream.begin(1)
    stream.ask(2)
    stream.session.end_input()
    assert stream.session.status().num_requests == 1
    assert stream.frames() == []
    assert not stream.session.is_over
    stream.desk.requests[0].done(torch.zeros(20, REPLY_COLS, dtype=torch.int32))
    assert stream.frames() == [(FrameType.REPLY, 2, 0)]
    assert stream.session.is_over


@pytest.mark.parametrize("how", ["answers", "errors"])
def test_a_tenant_that_asks_and_does_not_read_is_hung_up_on(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr("provider.net.session.MAX_REQUESTS", 5)
    stream = Stream()
    for number in range(1, 7):
        assert stream.hung_up == 0
        if how == "answers":
            stream.desk.here = torch.zeros(1, REPLY_COLS, dtype=torch.int32)
            stream.ask(number, rows=1)
            stream.session.receive(Header(FrameType.CANCEL, number).pack())
        else:
            stream.ask(number, deadline_ms=0)
    if how == "answers":
        stream.ask(7, rows=1)
    assert stream.hung_up == 1
    status = stream.session.status()
    assert (status.is_closed, status.num_requests, status.held_bytes) == (True, 0, 0)
    assert stream.usage.total().errors["QUOTA"] == 1


# ---- a token's row --------------------------------------------------------------------------------------------------


def test_a_row_is_answered_at_once(stream: Stream) -> None:
    assert stream.ask_row(1)
    message = stream.session.next_frame()
    assert message is not None
    header, payload = frame.parse(message)
    assert header == Header(FrameType.REPLY, 1, CALL, 1, REPLY_COLS, 0, 4 * REPLY_COLS)
    assert bytes(payload) == bytes(range(4 * REPLY_COLS))
    assert stream.session.is_idle
    assert stream.admission.in_flight() == (0, 0)
    assert stream.usage.total().rows["decode"] == 1


def test_a_row_beside_an_unread_reply_takes_a_place(stream: Stream) -> None:
    stream.desk.here = torch.zeros(1, REPLY_COLS, dtype=torch.int32)
    for number, held in ((1, 0), (2, 1), (3, 2)):
        stream.ask_row(number)
        assert (stream.session.status().num_requests, stream.desk.num_rows) == (held, 1)
    assert [number for _, number, _ in stream.frames()] == [1, 2, 3]


@pytest.mark.parametrize("outcome", [False, RemoteFault("broken")])
def test_a_row_that_is_not_answered_at_once(stream: Stream, outcome: VeilbaseError | bool) -> None:
    stream.desk.row = outcome
    stream.ask_row(1)
    if outcome is False:
        assert (stream.session.status().num_requests, len(stream.desk.requests)) == (1, 1)
        stream.desk.requests[0].done(torch.zeros(1, REPLY_COLS, dtype=torch.int32))
        assert stream.frames() == [(FrameType.REPLY, 1, 0)]
    else:
        assert stream.frames() == [(FrameType.ERROR, 1, WireCode.INTERNAL)]
    assert stream.session.is_idle
    assert stream.admission.in_flight() == (0, 0)


# ---- numbers of fewer bits ------------------------------------------------------------------------------------------


def packed_request(number: int, rows: torch.Tensor, call: Call = SHORT) -> bytes:
    data = frame.rows_bytes(rows, call.bits)
    return Header(FrameType.REQUEST, number, call, *rows.shape, 0, len(data), 30_000).pack() + bytes(data)


@pytest.mark.parametrize("reply_bits", [26, 16])
def test_rows_of_fewer_bits_are_unpacked_and_their_reply_packed(stream: Stream, reply_bits: int) -> None:
    call = replace(SHORT, reply_bits=reply_bits)
    rows, reply = rounded(ring_rows(20, COLS), 26), rounded(ring_rows(20, REPLY_COLS), 26)
    assert stream.session.receive(packed_request(1, rows, call))
    (request,) = stream.desk.requests
    assert isinstance(request.rows, torch.Tensor)
    assert torch.equal(request.rows, rows)
    assert request.ticket.call == CALL, "requests of all widths share products"
    assert stream.session.status().held_bytes == 4 * 20 * (COLS + REPLY_COLS), "numbers count as in memory"
    request.done(reply)
    message = stream.session.next_frame()
    assert message is not None
    header, payload = frame.parse(message)
    assert header.call == call
    assert header.total_bytes == len(payload) == 20 * row_bytes(REPLY_COLS, reply_bits)
    assert torch.equal(frame.tensor(header, payload), rounded(reply.clone(), reply_bits))
    assert stream.usage.total().bytes_up == len(packed_request(1, rows, call)) - frame.HEADER_BYTES
    assert stream.usage.total().bytes_down == len(payload)
    assert stream.admission.in_flight() == (0, 0)


def test_a_row_of_fewer_bits_is_answered_at_once(stream: Stream) -> None:
    seen = []
    multiply = stream.desk.compute_row

    def spy(tenant: str, call: Call, row: memoryview, reply: memoryview) -> VeilbaseError | bool:
        seen.append((call, bytes(row)))
        return multiply(tenant, call, row, reply)

    stream.desk.compute_row = spy  # type: ignore[method-assign]
    row = rounded(ring_rows(1, COLS), 26)
    assert stream.session.receive(memoryview(bytearray(packed_request(1, row))))
    message = stream.session.next_frame()
    assert message is not None
    header, payload = frame.parse(message)
    assert header == Header(FrameType.REPLY, 1, SHORT, 1, REPLY_COLS, 0, 17)
    assert bytes(payload) == bytes(range(17))
    assert seen == [(SHORT, bytes(pack(row, 26)))]
    assert stream.session.is_idle


def test_rows_that_do_not_end_with_zeros_answer_their_request_alone(stream: Stream) -> None:
    message = bytearray(packed_request(1, rounded(ring_rows(20, COLS), 26)))
    message[-1] |= 0x80
    assert stream.session.receive(memoryview(message))
    stream.expect_only(1, WireCode.INVALID_TENSOR)


def test_chunks_may_end_within_a_number(stream: Stream) -> None:
    rows = rounded(ring_rows(20, COLS), 26)
    whole = packed_request(1, rows)
    header, payload = frame.parse(whole)
    for start in range(0, len(payload), 7):
        part = replace(header, offset=start).pack() + bytes(payload[start : start + 7])
        assert stream.session.receive(part)
    (request,) = stream.desk.requests
    assert isinstance(request.rows, torch.Tensor)
    assert torch.equal(request.rows, rows)


@pytest.mark.parametrize(("at", "dropped"), [(46, 1), (46, 16), (46, 32), (47, 8), (47, 0), (47, 255)])
def test_widths_that_do_not_exist_end_the_stream(stream: Stream, at: int, dropped: int) -> None:
    message = bytearray(packed_request(1, rounded(ring_rows(20, COLS), 26)))
    message[at] = dropped
    assert not stream.session.receive(bytes(message))
    stream.expect_end(WireCode.MALFORMED)


def test_a_session_is_watched_by_one_callback(stream: Stream) -> None:
    notices: list[int] = []
    stream.session.notify = lambda: notices.append(1)
    stream.ask_row(1)
    assert len(notices) == 1
    stream.session.end_input()
    assert len(notices) == 2
    stream.session.close()
    assert len(notices) == 3


# ---- what counts as used --------------------------------------------------------------------------------------------


def _cancel(stream: Stream) -> None:
    stream.session.receive(Header(FrameType.CANCEL, 1).pack())


def _expire(stream: Stream) -> None:
    stream.session.sweep(time.monotonic() + 31)


def _misuse(stream: Stream) -> None:
    stream.session.receive(b"no frame")


def _revoke(stream: Stream) -> None:
    stream.refusal = lambda: WireCode.UNAUTHENTICATED
    stream.session.sweep(time.monotonic())


@pytest.mark.parametrize(
    ("end", "is_counted"),
    [
        (_cancel, True),
        (_expire, True),
        (_misuse, True),
        (lambda stream: stream.session.close(), True),
        (lambda stream: stream.session.end(WireCode.QUOTA), True),
        (_revoke, False),
        (lambda stream: stream.session.end(WireCode.UNAVAILABLE), False),
        (lambda stream: stream.session.end(WireCode.INTERNAL), False),
    ],
    ids=["cancel", "deadline", "misuse", "disconnected", "does not read", "revoked", "shutdown", "fault"],
)
def test_a_half_sent_reply_counts_unless_the_provider_ends_it(
    stream: Stream, end: Callable[[Stream], object], is_counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant that reads most of a reply and then gives it up owes it."""
    for module in ("wire.frame", "provider.net.requests"):
        monkeypatch.setattr(f"{module}.CHUNK_BYTES", 64)
    stream.ask(1)
    stream.desk.requests[-1].done(torch.zeros(20, REPLY_COLS, dtype=torch.int32))
    assert stream.session.next_frame() is not None
    assert stream.session.status().num_half_sent == 1
    end(stream)
    stream.session.close()
    total = stream.usage.total()
    assert sum(total.requests.values()) == is_counted
    assert total.bytes_down == is_counted * 20 * REPLY_COLS * 4
