"""Tests that the decoder, whatever bytes a peer sends, raises only errors of wire.errors with one plain line each, and
allocates within the limits."""

from __future__ import annotations

import copy
import json
import math
import struct
import unicodedata
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.manifests import valid
from wire import frame
from wire.errors import VeilbaseError, code_of, error_from_code
from wire.frame import (
    Arithmetic,
    Assembler,
    Call,
    Direction,
    FrameType,
    Header,
    Purpose,
    check_tensor_header,
    parse,
    payload_bytes,
)
from wire.manifest import Manifest, parse_manifest
from wire.ring.seeded_rows import Rows, SeededRows

MAX_ROWS = 64
MAX_TENSOR_BYTES = 4096
SPECIAL = [0, 1, 2, 3, 6, 7, 48, 255, 256, 4096, 2**16, 2**31 - 1, 2**31, 2**32 - 4, 2**32 - 1, 2**63, 2**64 - 1]


class Allocations:
    """Replaces the only allocation of wire.frame, and adds up the allocated bytes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, size: int) -> memoryview:
        self.sizes.append(size)
        assert size <= MAX_TENSOR_BYTES, f"{size} bytes would be allocated for a peer"
        return memoryview(bytearray(size))


@pytest.fixture(scope="module", autouse=True)
def allocations() -> Iterator[Allocations]:
    counter = Allocations()
    patch = pytest.MonkeyPatch()
    patch.setattr(frame, "unwritten", counter)
    yield counter
    patch.undo()


class Receiver:
    """Implements a minimal receiver: it checks header and limits, and joins chunks into a tensor."""

    def __init__(self) -> None:
        self.open: dict[int, Assembler] = {}
        self.complete: list[tuple[Header, Rows]] = []

    def take(self, message: bytes) -> None:
        header, payload = parse(message)
        assert len(payload) == len(message) - 48
        if header.kind not in (FrameType.REQUEST, FrameType.REPLY):
            return
        assembler = self.open.get(header.request_id)
        if assembler is None:
            check_tensor_header(header, MAX_ROWS, MAX_TENSOR_BYTES)
            assembler = self.open[header.request_id] = Assembler(header)
        if assembler.add(header, payload):
            del self.open[header.request_id]
            self.complete.append((assembler.header, assembler.rows()))

    def take_all(self, messages: list[bytes]) -> None:
        """Passes messages to the receiver until the first error, which ends a stream."""
        try:
            for message in messages:
                self.take(message)
        except VeilbaseError as exc:
            check_error(exc)
        for header, rows in self.complete:
            if isinstance(rows, SeededRows):
                assert (header.kind, header.call.purpose) == (FrameType.REQUEST, Purpose.HINT)
                assert rows.num_rows == header.rows <= MAX_ROWS
                assert rows.expand(3).shape == (header.rows, 3)
                continue
            assert rows.shape == (header.rows, header.cols)
            assert rows.dtype == frame.DTYPES[header.call.arithmetic]
            assert payload_bytes(header.kind, header.call, *rows.shape) == header.total_bytes
            assert rows.numel() * 4 <= MAX_TENSOR_BYTES
            rows.sum()  # reads every byte


def check_error(exc: VeilbaseError) -> None:
    message = str(exc)
    assert message.isprintable()
    assert len(message) < 300
    assert isinstance(error_from_code(code_of(exc), 1), VeilbaseError)


def call_of(group: int, direction: Direction, arithmetic: Arithmetic, purpose: Purpose, bits: int, short: bool) -> Call:
    """Returns a call, whose numbers have the given width where there is a choice."""
    if arithmetic is Arithmetic.FLOAT or purpose is Purpose.HINT:
        return Call(group, direction, arithmetic, purpose)
    return Call(group, direction, arithmetic, purpose, bits, 16 if short else bits)


calls = st.builds(
    call_of, st.integers(0, 3), st.sampled_from(Direction), st.sampled_from(Arithmetic), st.sampled_from(Purpose),
    st.sampled_from((24, 26, 28, 32)), st.booleans(),
)  # fmt: skip


@st.composite
def tensor_messages(draw: st.DrawFn) -> list[bytes]:
    """Makes the frames of one valid tensor or seed, in chunks of any size."""
    num_rows, cols = draw(st.integers(0, 8)), draw(st.integers(1, 8))
    kind, call = draw(st.sampled_from([FrameType.REQUEST, FrameType.REPLY])), draw(calls)
    data = bytes(range(256))[: num_rows * cols * 4]
    if data and frame.bits_of(kind, call) < 32:
        rows = torch.frombuffer(bytearray(data), dtype=torch.int32).view(num_rows, cols)
        data = bytes(frame.rows_bytes(rows, frame.bits_of(kind, call)))
    if kind is FrameType.REQUEST and call.purpose is Purpose.HINT:
        data = bytes(range(32)) + struct.pack("<QQ", draw(st.integers(0, 2**40 - num_rows)), num_rows)
    header = Header(kind, draw(st.integers(0, 2)), call, num_rows, cols, 0, len(data), 1000)
    size = draw(st.integers(1, 300))
    starts = range(0, max(len(data), 1), size)
    return [replace(header, offset=start).pack() + data[start : start + size] for start in starts]


OTHERS = st.sampled_from(
    [
        frame.hello(FrameType.HELLO),
        frame.hello(FrameType.WELCOME),
        Header(FrameType.CANCEL, 1).pack(),
        Header(FrameType.ERROR, 1, code=11).pack(),
    ]
)
FIELDS = [
    (0, "B"), (1, "B"), (2, "B"), (3, "B"), (4, "I"), (8, "Q"), (16, "I"), (20, "I"), (24, "Q"), (32, "Q"), (40, "I"),
    (44, "H"), (46, "B"), (47, "B"),
]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, messages: list[bytes]) -> list[bytes]:
    """Returns the messages after a few changes, or none, of bytes, whole fields, lengths, the order or the number of
    messages."""
    messages = list(messages)
    for _ in range(draw(st.integers(0, 3))):
        if not messages:
            break
        index = draw(st.integers(0, len(messages) - 1))
        message = bytearray(messages[index])
        how = draw(st.sampled_from(["field", "byte", "cut", "extend", "drop", "repeat", "swap"]))
        if how == "field" and len(message) >= 48:
            offset, letter = draw(st.sampled_from(FIELDS))
            limit = 2 ** (8 * struct.calcsize(letter))
            value = draw(st.sampled_from([v for v in SPECIAL if v < limit]) | st.integers(0, limit - 1))
            struct.pack_into("<" + letter, message, offset, value)
        elif how == "byte" and message:
            message[draw(st.integers(0, len(message) - 1))] = draw(st.integers(0, 255))
        elif how == "cut":
            del message[draw(st.integers(0, len(message))) :]
        elif how == "extend":
            message += draw(st.binary(max_size=64))
        messages[index] = bytes(message)
        if how == "drop":
            del messages[index]
        elif how == "repeat":
            messages.insert(draw(st.integers(0, len(messages))), messages[index])
        elif how == "swap":
            other = draw(st.integers(0, len(messages) - 1))
            messages[index], messages[other] = messages[other], messages[index]
    return messages


streams = st.lists(tensor_messages() | OTHERS.map(lambda message: [message]), min_size=1, max_size=4).map(
    lambda groups: [message for group in groups for message in group]
)


@given(st.binary(max_size=200))
@example(b"")
@example(bytes(48))
@example(b"\xff" * 48)
@settings(max_examples=300, deadline=None)
def test_random_bytes(message: bytes) -> None:
    Receiver().take_all([message])


@given(st.lists(st.binary(min_size=40, max_size=80).map(lambda tail: bytes([3, 0, 0, 0]) + tail), max_size=5))
@settings(max_examples=200, deadline=None)
def test_random_requests(messages: list[bytes]) -> None:
    Receiver().take_all(messages)


@given(streams.flatmap(mutated))
@settings(max_examples=600, deadline=None)
def test_mutated_streams(messages: list[bytes]) -> None:
    Receiver().take_all(messages)


@given(tensor_messages())
@settings(max_examples=100, deadline=None)
def test_valid_streams_pass(messages: list[bytes]) -> None:
    receiver = Receiver()
    for message in messages:
        receiver.take(message)
    ((header, rows),) = receiver.complete
    if isinstance(rows, SeededRows):
        assert (rows.seed, rows.num_rows) == (bytes(range(32)), header.rows)
    else:
        sent = b"".join(bytes(frame.parse(message)[1]) for message in messages)
        assert bytes(frame.rows_bytes(rows, frame.bits_of(header.kind, header.call))) == sent
        assert len(sent) == header.total_bytes


@given(
    calls, *[st.sampled_from(SPECIAL[:-3]) | st.integers(0, 100)] * 2, st.sampled_from(SPECIAL) | st.integers(0, 10_000)
)
@settings(max_examples=300, deadline=None)
def test_accepted_headers_are_within_the_limits(call: Call, rows: int, cols: int, total_bytes: int) -> None:
    header = Header(FrameType.REQUEST, 1, call, rows, cols, total_bytes=total_bytes)
    try:
        check_tensor_header(header, MAX_ROWS, MAX_TENSOR_BYTES)
    except VeilbaseError as exc:
        check_error(exc)
    else:
        assert rows <= MAX_ROWS
        assert payload_bytes(FrameType.REQUEST, call, rows, cols) == total_bytes <= MAX_TENSOR_BYTES


ROW_NUMBERS = st.integers(0, 2**41) | st.sampled_from(SPECIAL)


@given(
    st.binary(max_size=60)
    | st.builds(lambda *rows: bytes(range(32)) + struct.pack("<QQ", *rows), ROW_NUMBERS, ROW_NUMBERS)
)
@settings(max_examples=300, deadline=None)
def test_seeds_of_random_bytes(payload: bytes) -> None:
    try:
        rows = SeededRows.unpack(payload)
    except VeilbaseError as exc:
        check_error(exc)
    else:
        assert 0 <= rows.first_row <= rows.first_row + rows.num_rows <= 2**40
        assert rows.pack() == payload


def test_the_counter_counts(allocations: Allocations) -> None:
    before = len(allocations.sizes)
    header = Header(FrameType.REPLY, 1, rows=2, cols=2, total_bytes=16)
    Receiver().take(header.pack() + bytes(8))
    assert allocations.sizes[before:] == [16]


# ---- manifest --------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([math.inf, -math.inf, math.nan, 0, -0.0, 2**31, 10**300, "", "\x00", "\u2028", "1", "Infinity"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Returns the paths to all parts of a JSON value."""
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


PLACES = [path for path in places(valid()) if path]


@st.composite
def changed_manifests(draw: st.DrawFn) -> bytes:
    """Makes a valid manifest and changes it in one to three places."""
    content = copy.deepcopy(valid())
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from(PLACES))
        place: Any = content
        try:
            for part in parents:
                place = place[part]
            how = draw(st.sampled_from(["replace", "replace", "remove", "extra", "repeat"]))
            if how == "replace":
                place[last] = draw(JSON)
            elif how == "remove":
                del place[last]
            elif how == "extra" and isinstance(place, dict):
                place[draw(st.text(max_size=8))] = draw(JSON)
            elif how == "repeat" and isinstance(place, list):
                place.append(copy.deepcopy(place[last]))
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change removed this place
    return json.dumps(content).encode()


def read(data: bytes) -> None:
    """Reads a manifest. The result must be either one plain error, or a manifest that keeps its guarantees."""
    try:
        manifest = parse_manifest(data)
    except VeilbaseError as exc:
        check_error(exc)
        return
    assert [group.id for group in manifest.groups] == list(range(len(manifest.groups)))
    names = [layer.name for group in manifest.groups for layer in group.layers]
    assert len(set(names)) == len(names)
    for group in manifest.groups:
        assert sum(layer.out_features for layer in group.layers) == group.out_features
        assert 1 <= group.max_column_norm <= 127 * math.sqrt(group.in_features) * 1.00001
        assert 1 <= group.max_row_norm <= 127 * math.sqrt(group.out_features) * 1.00001
    assert not {unicodedata.category(char) for char in manifest.model_id} & {"Cc", "Cf", "Zl", "Zp"}
    assert isinstance(manifest, Manifest)


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_manifest_of_random_bytes(data: bytes) -> None:
    read(data)


@given(JSON)
@settings(max_examples=200, deadline=None)
def test_manifest_of_random_json(content: Any) -> None:
    read(json.dumps(content).encode())


@given(changed_manifests())
@settings(max_examples=400, deadline=None)
def test_changed_manifests(data: bytes) -> None:
    read(data)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_manifests_with_changed_bytes(data: st.DataObject) -> None:
    content = bytearray(json.dumps(valid()).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    read(bytes(content[: data.draw(st.integers(1, len(content)) | st.just(len(content)))]))
