"""Tests frames: golden bytes, a round trip of every field, splitting and joining of chunks, refusals, and no copy if
one frame suffices."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.repository import golden_vectors
from wire import frame
from wire.errors import InvalidTensor, LimitExceeded, MalformedFrame
from wire.frame import Arithmetic, Assembler, Call, Direction, FrameType, Header, Purpose, check_tensor_header, parse
from wire.limits import CHUNK_BYTES, MAX_FRAME_BYTES
from wire.ring.seeded_rows import SeededRows

CASES = golden_vectors("frames.json")
CALL = Call(3, Direction.BACKWARD, Arithmetic.RING, Purpose.EFFECT)
U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
CALLS = st.builds(Call, U32, st.sampled_from(Direction), st.sampled_from(Arithmetic), st.sampled_from(Purpose))


def tensor_header(rows: torch.Tensor, kind: FrameType = FrameType.REPLY) -> Header:
    return Header(kind, 7, CALL, rows.shape[0], rows.shape[1], 0, rows.numel() * 4)


def messages_of(rows: torch.Tensor) -> list[bytes]:
    return list(frame.frames(tensor_header(rows), frame.tensor_bytes(rows)))


def numbers(num_rows: int, cols: int) -> torch.Tensor:
    return torch.arange(num_rows * cols, dtype=torch.int32).view(num_rows, cols) - 5


def address(message: bytes) -> int:
    """Returns the address of a message's payload in memory."""
    return torch.frombuffer(message, dtype=torch.uint8).data_ptr() + frame.HEADER_BYTES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden(case: dict[str, Any]) -> None:
    fields = dict(case["fields"])
    call = Call(
        fields.pop("group", 0),
        Direction(fields.pop("direction", 0)),
        Arithmetic(fields.pop("arithmetic", 0)),
        Purpose(fields.pop("purpose", 0)),
        32 - fields.pop("dropped", 0),
        32 - fields.pop("reply_dropped", 0),
    )
    expected = Header(FrameType(fields.pop("type")), call=call, **fields)
    message = bytes.fromhex(case["message"])
    header, payload = parse(message)
    assert header == expected
    assert bytes(payload).hex() == case["payload"]
    assert expected.pack() + bytes(payload) == message


@pytest.mark.parametrize(("kind", "name"), [(FrameType.HELLO, "hello"), (FrameType.WELCOME, "welcome")])
def test_handshake_bytes(kind: FrameType, name: str) -> None:
    (message,) = [case["message"] for case in CASES if case["name"] == name]
    assert frame.hello(kind).hex() == message


@given(
    st.builds(Header, st.sampled_from(FrameType), U64, CALLS, U32, U32, U64, U64, U32, U16),
    st.binary(max_size=64),
)
def test_every_field_survives(header: Header, payload: bytes) -> None:
    message = header.pack() + payload
    assert len(message) == 48 + len(payload)
    if header.offset + len(payload) > header.total_bytes:
        with pytest.raises(MalformedFrame, match="does not fit"):
            parse(message)
        return
    parsed, view = parse(message)
    assert parsed == header
    assert view == payload


@pytest.mark.parametrize("length", [0, 1, 47])
def test_refuses_short_messages(length: int) -> None:
    with pytest.raises(MalformedFrame, match=f"at least 48 bytes, got {length}"):
        parse(bytes(length))


@pytest.mark.parametrize(
    ("offset", "value"), [(0, 0), (0, 10), (0, 255), (1, 2), (2, 2), (3, 4), (46, 1), (46, 8), (47, 128)]
)
def test_refuses_unknown_numbers(offset: int, value: int) -> None:
    message = bytearray(Header(FrameType.CANCEL, 1).pack())
    message[offset] = value
    with pytest.raises(MalformedFrame):
        parse(bytes(message))


def test_refuses_an_offset_that_would_overflow() -> None:
    with pytest.raises(MalformedFrame):
        parse(Header(FrameType.REPLY, 1, offset=2**64 - 1, total_bytes=8).pack() + b"x" * 8)


# ---- chunks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_bytes", "sizes"),
    [
        (0, [0]),
        (4, [4]),
        (CHUNK_BYTES - 4, [CHUNK_BYTES - 4]),
        (CHUNK_BYTES, [CHUNK_BYTES]),
        (CHUNK_BYTES + 4, [CHUNK_BYTES, 4]),
        (2 * CHUNK_BYTES, [CHUNK_BYTES, CHUNK_BYTES]),
        (2 * CHUNK_BYTES + 12, [CHUNK_BYTES, CHUNK_BYTES, 12]),
    ],
)
def test_splits_at_chunk_bytes(num_bytes: int, sizes: list[int]) -> None:
    rows = numbers(num_bytes // 4, 1)
    messages = messages_of(rows)
    parsed = [parse(message) for message in messages]
    assert [len(payload) for _, payload in parsed] == sizes
    assert [header.offset for header, _ in parsed] == [CHUNK_BYTES * i for i in range(len(sizes))]
    assert all(replace(header, offset=0) == tensor_header(rows) for header, _ in parsed)
    assert max(len(message) for message in messages) <= MAX_FRAME_BYTES
    assembler = Assembler(parsed[0][0])
    assert [assembler.add(*chunk) for chunk in parsed] == [False] * (len(sizes) - 1) + [True]
    assert torch.equal(assembler.tensor(), rows)


@pytest.mark.parametrize("arithmetic", list(Arithmetic))
def test_one_frame_is_not_copied(arithmetic: Arithmetic) -> None:
    rows = numbers(3, 5).to(frame.DTYPES[arithmetic])
    call = Call(0, Direction.FORWARD, arithmetic)
    header = Header(FrameType.REPLY, 7, call, 3, 5, 0, 60)
    (message,) = frame.frames(header, frame.tensor_bytes(rows))
    parsed, payload = parse(message)
    assembler = Assembler(parsed)
    assert assembler.add(parsed, payload)
    tensor = assembler.tensor()
    assert tensor.dtype == frame.DTYPES[arithmetic]
    assert torch.equal(tensor, rows)
    assert tensor.data_ptr() == address(message)
    del message, payload, parsed, assembler
    assert torch.equal(tensor, rows)  # the tensor keeps the frame alive


def test_sending_copies_contiguous_rows_once() -> None:
    rows = numbers(4, 6)
    view = frame.tensor_bytes(rows)
    assert view.nbytes == 96
    assert torch.frombuffer(view, dtype=torch.int32).data_ptr() == rows.data_ptr()


@pytest.mark.parametrize(
    "rows", [numbers(6, 4).t(), numbers(4, 8)[:, ::2], numbers(8, 3)[::2], numbers(5, 1).t(), numbers(1, 9)[:, 3:5]]
)
def test_rows_of_any_layout_are_sent_in_order(rows: torch.Tensor) -> None:
    flat = rows.flatten().tolist()
    assert bytes(frame.tensor_bytes(rows)) == struct.pack(f"<{len(flat)}i", *flat)


def test_a_tensor_that_needs_a_gradient_can_be_sent() -> None:
    rows = torch.ones(2, 2, requires_grad=True)
    assert bytes(frame.tensor_bytes(rows)) == bytes.fromhex("0000803f") * 4


@pytest.mark.parametrize("shape", [(0, 5), (0, 0), (3, 0)])
def test_tensors_without_numbers(shape: tuple[int, int]) -> None:
    rows = torch.empty(shape, dtype=torch.int32)
    (message,) = messages_of(rows)
    assert len(message) == frame.HEADER_BYTES
    header, payload = parse(message)
    check_tensor_header(header, 10, 4096)
    assembler = Assembler(header)
    assert assembler.add(header, payload)
    assert assembler.tensor().shape == shape


def small_chunks(rows: torch.Tensor, size: int) -> list[tuple[Header, memoryview]]:
    """Returns chunks of `size` bytes, which a peer may send although this code would not."""
    data = bytes(frame.tensor_bytes(rows))
    header = tensor_header(rows)
    return [
        (replace(header, offset=start), memoryview(data)[start : start + size]) for start in range(0, len(data), size)
    ]


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 400))
def test_chunks_of_any_size(num_rows: int, cols: int, size: int) -> None:
    rows = numbers(num_rows, cols)
    chunks = small_chunks(rows, size)
    assembler = Assembler(chunks[0][0])
    assert [assembler.add(*chunk) for chunk in chunks][-1]
    assert torch.equal(assembler.tensor(), rows)


def broken(chunks: list[tuple[Header, memoryview]], how: str) -> list[tuple[Header, memoryview]]:
    first, second, third = chunks[:3]
    header, payload = second
    changed = {
        "shape": replace(header, rows=2, cols=12),
        "call": replace(header, call=replace(CALL, group=4)),
        "direction": replace(header, call=replace(CALL, direction=Direction.FORWARD)),
        "total": replace(header, total_bytes=header.total_bytes + 4),
        "overlap": replace(header, offset=header.offset - 4),
        "gap": replace(header, offset=header.offset + 4),
    }
    if how in changed:
        return [first, (changed[how], payload)]
    return {
        "wrong order": [first, third],
        "last first": [third],
        "twice": [first, second, second],
        "empty first": [(first[0], payload[:0])],
        "empty later": [first, (header, payload[:0])],
        "after the end": [*chunks, (replace(header, offset=header.total_bytes), payload[:0])],
        "the whole once more": [*chunks, first],
    }[how]


@pytest.mark.parametrize(
    "how",
    ["shape", "call", "direction", "total", "overlap", "gap", "wrong order", "last first", "twice", "empty first",
     "empty later", "after the end", "the whole once more"],
)  # fmt: skip
def test_chunks_that_do_not_continue(how: str) -> None:
    chunks = small_chunks(numbers(4, 6), 32)
    assembler = Assembler(chunks[0][0])
    *good, bad = broken(chunks, how)
    for chunk in good:
        assembler.add(*chunk)
    with pytest.raises(MalformedFrame, match="chunk"):
        assembler.add(*bad)


def test_nothing_is_allocated_before_a_chunk_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(frame, "bytearray", made.append, raising=False)
    header = Header(FrameType.REQUEST, 1, CALL, 2**20, 2**10, 0, 2**32)
    assembler = Assembler(header)
    with pytest.raises(MalformedFrame):
        assembler.add(header, memoryview(b""))
    assert made == []
    (whole,) = messages_of(numbers(2, 2))
    parsed, payload = parse(whole)
    Assembler(parsed).add(parsed, payload)
    assert made == []


# ---- hints -----------------------------------------------------------------------------------------------------------

HINT = Call(3, Direction.BACKWARD, Arithmetic.RING, Purpose.HINT)
SEEDED = SeededRows(bytes(range(32)), 2**40 - 5, 5)


def hint_header(rows: int = 5, total_bytes: int = 48) -> Header:
    return Header(FrameType.REQUEST, 7, HINT, rows, 1000, 0, total_bytes)


def received(header: Header, payload: bytes, size: int = 48) -> Assembler:
    """Returns an assembler that received the payload in chunks of `size` bytes."""
    assembler = Assembler(header)
    for start in range(0, len(payload), size):
        assembler.add(replace(header, offset=start), memoryview(payload)[start : start + size])
    return assembler


@pytest.mark.parametrize("size", [1, 32, 47, 48])
def test_a_hint_carries_a_seed(size: int) -> None:
    check_tensor_header(hint_header(), 10, 20_000)
    assert received(hint_header(), bytes(frame.rows_bytes(SEEDED)), size).rows() == SEEDED


def test_a_hint_without_rows_carries_a_seed_too() -> None:
    check_tensor_header(hint_header(0), 10, 4096)
    nothing = SeededRows(bytes(32), 9, 0)
    assert received(hint_header(0), nothing.pack()).rows() == nothing


@pytest.mark.parametrize("total_bytes", [0, 20_000, 47, 49])
def test_refuses_another_size_of_a_hint(total_bytes: int) -> None:
    with pytest.raises(MalformedFrame, match="do not make"):
        check_tensor_header(hint_header(total_bytes=total_bytes), 10, 40_960)


def test_a_hint_counts_as_the_rows_it_stands_for() -> None:
    with pytest.raises(LimitExceeded, match="at most 19999 bytes of rows"):
        check_tensor_header(hint_header(), 10, 19_999)


def test_a_hint_may_not_ask_for_more_rows_than_the_limit() -> None:
    with pytest.raises(LimitExceeded, match="at most 4 rows"):
        check_tensor_header(hint_header(), 4, 4096)


@pytest.mark.parametrize(
    ("first_row", "num_rows"), [(0, 4), (0, 6), (0, 0), (2**40 - 4, 5), (2**64 - 1, 5), (0, 2**64 - 1), (0, 2**32 + 5)]
)
def test_refuses_a_seed_that_does_not_fit_its_header(first_row: int, num_rows: int) -> None:
    payload = bytes(range(32)) + struct.pack("<QQ", first_row, num_rows)
    with pytest.raises(InvalidTensor, match="seed"):
        received(hint_header(), payload).rows()


def test_other_frames_carry_tensors() -> None:
    rows = numbers(5, 3)
    for kind, purpose in [(FrameType.REQUEST, Purpose.EFFECT), (FrameType.REPLY, Purpose.HINT)]:
        header = replace(tensor_header(rows, kind), call=replace(HINT, purpose=purpose))
        check_tensor_header(header, 10, 4096)
        content = received(header, bytes(frame.rows_bytes(rows)), 60).rows()
        assert isinstance(content, torch.Tensor)
        assert torch.equal(content, rows)
        with pytest.raises(MalformedFrame):
            check_tensor_header(replace(header, total_bytes=48), 10, 4096)


@pytest.mark.parametrize(
    ("kind", "purpose", "expected"),
    [
        (FrameType.REQUEST, Purpose.PRODUCT, 60),
        (FrameType.REQUEST, Purpose.EFFECT, 60),
        (FrameType.REQUEST, Purpose.HINT, 48),
        (FrameType.REPLY, Purpose.HINT, 60),
    ],
)
def test_payload_bytes(kind: FrameType, purpose: Purpose, expected: int) -> None:
    assert frame.payload_bytes(kind, replace(HINT, purpose=purpose), 5, 3) == expected


def test_rows_suit_their_call() -> None:
    frame.check_rows(HINT, SEEDED)
    frame.check_rows(CALL, numbers(2, 3))
    frame.check_rows(replace(CALL, arithmetic=Arithmetic.FLOAT), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("call", "rows"),
    [(HINT, numbers(2, 3)), (CALL, SEEDED), (CALL, torch.zeros(2, 3)), (CALL, numbers(2, 3)[0]),
     (replace(CALL, arithmetic=Arithmetic.FLOAT), numbers(2, 3))],
)  # fmt: skip
def test_rows_that_do_not_suit_their_call(call: Call, rows: torch.Tensor | SeededRows) -> None:
    with pytest.raises(InvalidTensor, match="expected"):
        frame.check_rows(call, rows)


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "cols", "total"), [(10, 100, 4000), (0, 2**32 - 1, 0), (10, 1024, 40_960), (1, 1, 4)])
def test_accepts_what_is_within_the_limits(rows: int, cols: int, total: int) -> None:
    check_tensor_header(Header(FrameType.REQUEST, 1, CALL, rows, cols, 0, total), 10, 40_960)


@pytest.mark.parametrize(("rows", "cols", "total"), [(11, 1, 44), (10, 1025, 41_000), (1, 2**32 - 1, 2**34 - 4)])
def test_refuses_what_is_larger_than_the_limits(rows: int, cols: int, total: int) -> None:
    with pytest.raises(LimitExceeded, match="at most 10 rows and 40960 bytes"):
        check_tensor_header(Header(FrameType.REQUEST, 1, CALL, rows, cols, 0, total), 10, 40_960)


@pytest.mark.parametrize(
    ("rows", "cols", "total"), [(2, 3, 23), (2, 3, 0), (2, 3, 28), (0, 5, 4), (2**31, 2, 0), (2**30, 1, 0)]
)
def test_refuses_a_byte_count_that_is_not_the_shapes(rows: int, cols: int, total: int) -> None:
    with pytest.raises(MalformedFrame, match="do not make"):
        check_tensor_header(Header(FrameType.REQUEST, 1, CALL, rows, cols, 0, total), 2**32, 40_960)
