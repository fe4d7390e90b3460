"""Tests the multiplexer over a stream that is neither gRPC's nor a socket's: `MessageStream` is all that it needs."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.support.ring_products import ring_rows
from tests.support.waiting import WAIT_S
from wire import frame
from wire.errors import DeadlineExceeded, MalformedFrame, TransportError, Unavailable, VeilbaseError, WireCode
from wire.frame import Arithmetic, Call, Direction, FrameType, Header
from wire.limits import Limits
from wire.payload import RowsPayload
from wire.ring.widths import pack, rounded
from wire.transport.connection import MessageStream, Traffic
from wire.transport.multiplexer import Multiplexer, Request

CALL = Call(0, Direction.FORWARD, Arithmetic.RING)
SHORT = Call(0, Direction.FORWARD, Arithmetic.RING, bits=26, reply_bits=16)
ROWS = torch.ones(3, 4, dtype=torch.int32)


class Stream(MessageStream):
    """Keeps what is sent, and gives or raises what the test puts in."""

    has_unsent = False

    def __init__(self) -> None:
        self.sent: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.coming: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
        self._is_active = True

    def send(self, message: bytes | memoryview) -> None:
        self.sent.put(bytes(message))

    def step(self) -> bytes:
        found = self.coming.get(timeout=WAIT_S)
        if isinstance(found, Exception):
            raise found
        return found

    def is_active(self) -> bool:
        return self._is_active

    def close(self) -> None:
        self._is_active = False
        self.coming.put(EOFError())


@pytest.fixture
def stream() -> Iterator[Stream]:
    made = Stream()
    yield made
    made.close()


def greeted(stream: Stream) -> Multiplexer:
    made = Multiplexer(stream, Limits(), Traffic())
    stream.coming.put(frame.hello(FrameType.WELCOME))
    made.wait_welcome()
    assert frame.parse(stream.sent.get(timeout=WAIT_S))[0].kind is FrameType.HELLO
    return made


def test_a_request_and_its_reply(stream: Stream) -> None:
    tenant = greeted(stream)
    request = tenant.submit(CALL, RowsPayload(ROWS), 2)
    asked, _ = frame.parse(stream.sent.get(timeout=WAIT_S))
    reply = Header(FrameType.REPLY, asked.request_id, CALL, 3, 2, 0, 24)
    stream.coming.put(reply.pack() + bytes(24))
    assert torch.equal(request.result(), torch.zeros(3, 2, dtype=torch.int32))
    tenant.close()


def test_rows_and_replies_of_fewer_bits(stream: Stream) -> None:
    tenant = greeted(stream)
    rows, reply = rounded(ring_rows(3, 5), 26), rounded(ring_rows(3, 7), 16)
    request = tenant.submit(SHORT, RowsPayload(rows), 7)
    asked, payload = frame.parse(stream.sent.get(timeout=WAIT_S))
    assert (asked.call, asked.total_bytes, len(payload)) == (SHORT, 3 * 17, 3 * 17)
    assert torch.equal(frame.tensor(asked, payload), rows)
    stream.coming.put(Header(FrameType.REPLY, asked.request_id, SHORT, 3, 7, 0, 3 * 14).pack() + bytes(pack(reply, 16)))
    assert torch.equal(request.result(), reply)
    tenant.close()


@pytest.mark.parametrize(
    ("call", "size", "last"),
    [
        (replace(SHORT, reply_bits=26), 3 * 17, 0),
        (replace(SHORT, bits=24), 3 * 10, 0),
        (CALL, 3 * 20, 0),
        (SHORT, 3 * 20, 0),
        (SHORT, 3 * 10 - 1, 0),
        (replace(SHORT, reply_bits=26), 3 * 17, 0x80),
    ],
)
def test_a_reply_of_another_width_than_was_asked_for(stream: Stream, call: Call, size: int, last: int) -> None:
    """The last case asks for what it gets, but the row does not end with zeros."""
    tenant = greeted(stream)
    asked_for = call if last else SHORT
    request = tenant.submit(asked_for, RowsPayload(rounded(ring_rows(3, 5), 26)), 5)
    asked, _ = frame.parse(stream.sent.get(timeout=WAIT_S))
    reply = Header(FrameType.REPLY, asked.request_id, call, 3, 5, 0, size).pack() + bytes(size - 1) + bytes([last])
    stream.coming.put(reply)
    with pytest.raises(MalformedFrame):
        request.result()
    assert not tenant.is_usable()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EOFError(), Unavailable),
        (Unavailable("the connection broke"), Unavailable),
        (MalformedFrame("a length that no message may have"), MalformedFrame),
        (ValueError("a text with a secret 123"), TransportError),
    ],
)
def test_a_streams_end_is_an_error_of_the_tree(stream: Stream, error: Exception, kind: type[VeilbaseError]) -> None:
    tenant = greeted(stream)
    request = tenant.submit(CALL, RowsPayload(ROWS), 2)
    stream.coming.put(error)
    with pytest.raises(VeilbaseError) as caught:
        request.result()
    assert type(caught.value) is kind
    assert "123" not in str(caught.value)
    assert tenant.failure is not None
    assert tenant.failure.__traceback__ is None, "a traceback would keep the stream, and what it received"
    assert not tenant.is_usable()
    with pytest.raises(kind):
        tenant.submit(CALL, RowsPayload(ROWS), 2)


def test_a_second_look_at_a_result_sends_nothing(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not if the request was refused, sent again, and then ended in an error."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    tenant = greeted(stream)
    sent = []

    def refuse(message: bytes | memoryview) -> None:
        sent.append(message)
        code, retry_ms = ((WireCode.QUOTA, 1), (WireCode.DEADLINE, 0))[len(sent) - 1]
        stream.coming.put(Header(FrameType.ERROR, len(sent), code=code, deadline_ms=retry_ms).pack())

    monkeypatch.setattr(stream, "send", refuse)
    request = tenant.submit(CALL, RowsPayload(ROWS), 2)
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            request.result()
    assert len(sent) == 2
    tenant.close()


def test_an_interrupted_wait_goes_on_with_what_was_sent(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    tenant = greeted(stream)
    request = tenant.submit(CALL, RowsPayload(ROWS), 2)
    stream.coming.put(Header(FrameType.ERROR, 1, code=WireCode.QUOTA, deadline_ms=1).pack())
    wait, calls = Request.wait, []

    def interrupted(each: Request) -> torch.Tensor:
        calls.append(each)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return wait(each)

    monkeypatch.setattr(Request, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        request.result()
    stream.coming.put(Header(FrameType.REPLY, 2, CALL, 3, 2, 0, 24).pack() + bytes(24))
    assert torch.equal(request.result(), torch.zeros(3, 2, dtype=torch.int32))
    assert stream.sent.qsize() == 2
    tenant.close()
