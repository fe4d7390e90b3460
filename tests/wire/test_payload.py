"""Tests that every kind of payload sends the same bytes each time, states how many there are, and shows none of
them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from wire import frame
from wire.errors import InvalidTensor
from wire.frame import HEADER_BYTES, Arithmetic, Call, Direction, FrameType, Header, Purpose
from wire.limits import CHUNK_BYTES
from wire.payload import MessagePayload, Payload, RowsPayload, SeedPayload
from wire.ring.seeded_rows import SeededRows
from wire.ring.widths import rounded

CALL = Call(3, Direction.FORWARD, Arithmetic.RING)
HINT = Call(3, Direction.FORWARD, Arithmetic.RING, Purpose.HINT)
SECRET = 123456789


def in_message(cols: int, bits: int = 32) -> MessagePayload:
    payload = MessagePayload(cols, bits)
    payload.numbers[:] = short_rows(1, cols, bits).numpy().tobytes()
    return payload


def short_rows(num_rows: int, cols: int, bits: int) -> torch.Tensor:
    return rounded(torch.full((num_rows, cols), SECRET, dtype=torch.int32), bits)


def header_of(payload: Payload, call: Call) -> Header:
    return Header(
        FrameType.REQUEST,
        7,
        call,
        payload.num_rows,
        payload.cols,
        0,
        frame.payload_bytes(FrameType.REQUEST, call, payload.num_rows, payload.cols),
        1000,
    )


CASES = [
    (RowsPayload(torch.full((5, 4), SECRET, dtype=torch.int32)), CALL),
    (RowsPayload(torch.full((CHUNK_BYTES // 4, 3), SECRET, dtype=torch.int32)), CALL),
    (RowsPayload(torch.empty(0, 4, dtype=torch.int32)), CALL),
    (SeedPayload(SeededRows(b"\x15\xcd\x5b\x07" * 8, 2, 9), 40), HINT),
    (in_message(6), CALL),
    *((RowsPayload(short_rows(5, 7, bits)), replace(CALL, bits=bits, reply_bits=bits)) for bits in (24, 26, 28)),
    (RowsPayload(short_rows(CHUNK_BYTES // 4, 3, 26)), replace(CALL, bits=26, reply_bits=16)),
    *((in_message(7, bits), replace(CALL, bits=bits, reply_bits=bits)) for bits in (24, 26, 28)),
]


@pytest.mark.parametrize(("payload", "call"), CASES)
def test_the_frames_hold_the_rows_however_often_they_are_made(payload: Payload, call: Call) -> None:
    payload.check(call)
    sent = []
    for request_id in (7, 8):
        header = header_of(payload, call)
        header.request_id = request_id
        messages = [bytes(message) for message in payload.frames(header)]
        parsed = [frame.parse(message) for message in messages]
        assert [one.request_id for one, _ in parsed] == [request_id] * len(messages)
        assert all(len(content) <= CHUNK_BYTES for _, content in parsed)
        assembler = frame.Assembler(parsed[0][0])
        assert [assembler.add(*one) for one in parsed] == [False] * (len(parsed) - 1) + [True]
        received, rows = assembler.rows(), payload.rows(call)
        if isinstance(received, SeededRows):
            assert received == rows
        else:
            assert isinstance(rows, torch.Tensor)
            assert torch.equal(received, rows)
        sent.append(b"".join(bytes(content) for _, content in parsed))
    assert sent[0] == sent[1]
    assert len(sent[0]) == header.total_bytes


def test_rows_are_masked_only_if_their_mask_says_so() -> None:
    """What `masked_rows` returns may be written to memory that the provider shares."""
    ring, real = torch.full((5, 4), SECRET, dtype=torch.int32), torch.ones(5, 4)
    assert RowsPayload(ring, is_masked=True).masked_rows is ring
    for readable in (RowsPayload(ring), RowsPayload(real), RowsPayload(real, is_masked=True), in_message(6)):
        assert readable.masked_rows is None


@pytest.mark.parametrize(("payload", "call"), CASES)
def test_nothing_of_it_is_printed(payload: Payload, call: Call) -> None:
    assert str(SECRET) not in repr(payload)
    assert "15cd5b07" not in repr(payload).replace("\\x", "")


def test_content_that_does_not_suit_the_call_is_refused() -> None:
    rows = torch.zeros(2, 3, dtype=torch.int32)
    for payload, call in [
        (RowsPayload(rows), HINT),
        (RowsPayload(rows.to(torch.float32)), CALL),
        (SeedPayload(SeededRows(bytes(32), 0, 2), 3), CALL),
        (in_message(3), HINT),
    ]:
        with pytest.raises(InvalidTensor):
            payload.check(call)
    with pytest.raises(InvalidTensor, match="a matrix"):
        RowsPayload(torch.zeros(3, dtype=torch.int32))


def test_a_row_is_sent_from_where_it_was_written() -> None:
    payload = in_message(6)
    (message,) = payload.frames(header_of(payload, CALL))
    payload.numbers[:4] = b"\x01\x00\x00\x00"
    assert bytes(message[HEADER_BYTES : HEADER_BYTES + 4]) == b"\x01\x00\x00\x00"
    assert MessagePayload.fits(CHUNK_BYTES // 4)
    assert not MessagePayload.fits(CHUNK_BYTES // 4 + 1)


def test_rows_cross_only_if_they_are_elsewhere() -> None:
    """Torch's `meta` device stands in for a GPU: its tensors have no numbers that could cross."""
    there, here = torch.zeros(2, 3, dtype=torch.int32, device="meta"), torch.zeros(2, 3, dtype=torch.int32)
    for payload in (RowsPayload(there), RowsPayload(there.t().contiguous().t())):
        on_it = payload.rows_on(torch.device("meta"))
        assert on_it is not None
        assert on_it.device.type == "meta"
        assert payload.rows_on(torch.device("cpu")) is None
    assert RowsPayload(here).rows_on(torch.device("cpu")) is here
    assert in_message(3).rows_on(torch.device("cpu")) is None
    assert SeedPayload(SeededRows(bytes(32), 0, 2), 3).rows_on(torch.device("cpu")) is None
