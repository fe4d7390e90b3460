"""Tests requests for hints, over real mTLS and in process. A tenant sends the seed of a public matrix and gets the
matrix's product with a weight. A seed that is malformed, or that asks for too many rows, is refused."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from provider.engine import products
from provider.model.served_model import ServedModel
from provider.operations.recording import Recorder
from tests.support.providers import LIMITS, Provider
from tests.support.raw_peers import RawStream
from tests.support.ring_products import COLS, REPLY_COLS, ask, ring_rows
from wire import frame
from wire.errors import InvalidTensor, UnknownLayer, WireCode
from wire.frame import Arithmetic, Assembler, Call, Direction, FrameType, Header, Purpose
from wire.limits import Limits
from wire.payload import RowsPayload, SeedPayload
from wire.ring.seeded_rows import PACKED_BYTES, SeededRows
from wire.transport.inproc import InprocConnection

SEED = bytes(range(32))
HINT = Call(0, Direction.FORWARD, Arithmetic.RING, Purpose.HINT)
BACKWARD = replace(HINT, direction=Direction.BACKWARD)
HEAD_BYTES = frame.HEADER_BYTES


class HintStream(RawStream):
    """Sends valid and invalid requests for hints."""

    def hint(self, request_id: int, seeded: SeededRows, call: Call = HINT, **changes: int) -> bytes:
        """Returns a message with a request for a hint; `changes` are made to its header."""
        cols = COLS if call.direction is Direction.FORWARD else REPLY_COLS
        fields = {"rows": seeded.num_rows, "cols": cols, "total_bytes": PACKED_BYTES, "deadline_ms": 30_000}
        return Header(FrameType.REQUEST, request_id, call, **{**fields, **changes}).pack() + seeded.pack()

    def reply(self) -> tuple[Header, torch.Tensor]:
        header, payload = frame.parse(next(self.call))
        assert header.kind is FrameType.REPLY
        assembler = Assembler(header)
        while not assembler.add(header, payload):
            header, payload = frame.parse(next(self.call))
        return assembler.header, assembler.tensor()


@pytest.fixture
def raw(provider: Provider) -> Iterator[HintStream]:
    stream = HintStream(provider)
    yield stream
    stream.close()


def product_of(served_model: ServedModel, rows: SeededRows, call: Call) -> torch.Tensor:
    """Returns the product of the expanded rows, computed as for any rows."""
    info = served_model.manifest().groups[call.group]
    cols = info.in_features if call.direction is Direction.FORWARD else info.out_features
    return served_model.compute(replace(call, purpose=Purpose.PRODUCT), rows.expand(cols))


def assert_goes_on(raw: HintStream, served_model: ServedModel) -> None:
    rows = SeededRows(SEED, 4, 3)
    raw.send(raw.hint(1000, rows))
    header, reply = raw.reply()
    assert header.request_id == 1000
    assert torch.equal(reply, product_of(served_model, rows, HINT))


# ---- good requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [0, 1, 8, 9, 4096])
@pytest.mark.parametrize("call", [HINT, BACKWARD])
def test_a_hint_is_the_product_of_the_expanded_rows(
    provider: Provider, raw: HintStream, call: Call, num_rows: int
) -> None:
    rows = SeededRows(SEED, 2**40 - 5000, num_rows)
    raw.send(raw.hint(1, rows, call))
    header, reply = raw.reply()
    reply_cols = REPLY_COLS if call is HINT else COLS
    assert (header.request_id, header.call, header.rows, header.cols) == (1, call, num_rows, reply_cols)
    assert header.total_bytes == num_rows * reply_cols * 4
    assert torch.equal(reply, product_of(provider.served_model, rows, call))


def test_every_group(provider: Provider, raw: HintStream) -> None:
    rows = SeededRows(SEED, 7, 40)
    for info in provider.served_model.manifest().groups:
        for direction, cols in ((Direction.FORWARD, info.in_features), (Direction.BACKWARD, info.out_features)):
            call = replace(HINT, group=info.id, direction=direction)
            raw.send(raw.hint(2 * info.id + direction + 1, rows, call, cols=cols))
            assert torch.equal(raw.reply()[1], product_of(provider.served_model, rows, call))


def test_a_seed_in_pieces(provider: Provider, raw: HintStream) -> None:
    rows = SeededRows(SEED, 0, 5)
    message = raw.hint(1, rows)
    first, _ = frame.parse(message)
    raw.send(message[: HEAD_BYTES + 32], replace(first, offset=32).pack() + message[HEAD_BYTES + 32 :])
    assert torch.equal(raw.reply()[1], product_of(provider.served_model, rows, HINT))


def test_hints_and_products_in_flight(provider: Provider, raw: HintStream) -> None:
    given = {number: ring_rows(number) for number in range(1, 20, 2)}
    seeded = {number: SeededRows(SEED, number, number) for number in range(2, 20, 2)}
    for number in range(1, 20):
        raw.send(*(raw.request(number, given[number]) if number in given else [raw.hint(number, seeded[number])]))
    replies = {header.request_id: reply for header, reply in (raw.reply() for _ in range(1, 20))}
    for number, rows in given.items():
        assert torch.equal(replies[number], provider.served_model.compute(replace(HINT, purpose=Purpose.PRODUCT), rows))
    for number, rows in seeded.items():
        assert torch.equal(replies[number], product_of(provider.served_model, rows, HINT))


@pytest.mark.parametrize(("call", "reply_cols"), [(HINT, REPLY_COLS), (BACKWARD, COLS)])
def test_through_the_client(provider: Provider, call: Call, reply_cols: int) -> None:
    connection = provider.connect()
    rows = SeededRows(SEED, 5, 1000)
    assert torch.equal(ask(connection, rows, call, reply_cols), product_of(provider.served_model, rows, call))


def test_the_worker_makes_hints(provider: Provider, raw: HintStream, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    compute = products.compute

    def spy(*args: object) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return compute(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("provider.model.served_model.products.compute", spy)
    raw.send(raw.hint(1, SeededRows(SEED, 0, 17)))
    raw.reply()
    raw.send(*raw.request(2, ring_rows(2)))
    raw.reply()
    assert threads[0] == "veilbase-compute"
    assert threads[1] != "veilbase-compute"  # the receiving thread computes a product of two rows


# ---- bad requests: the request fails, the stream goes on ------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "changes", "code"),
    [
        (replace(HINT, arithmetic=Arithmetic.FLOAT), {}, WireCode.UNKNOWN_LAYER),
        (replace(HINT, group=10_000), {}, WireCode.UNKNOWN_LAYER),
        (HINT, {"cols": COLS + 1}, WireCode.INVALID_TENSOR),
        (BACKWARD, {"cols": COLS}, WireCode.INVALID_TENSOR),
        (HINT, {"rows": 4}, WireCode.INVALID_TENSOR),
        (HINT, {"rows": 0}, WireCode.INVALID_TENSOR),
        (HINT, {"total_bytes": 5 * COLS * 4}, WireCode.INVALID_TENSOR),
        (HINT, {"total_bytes": 49}, WireCode.INVALID_TENSOR),
        (HINT, {"rows": 4097}, WireCode.LIMIT),
        (HINT, {"rows": 2**32 - 1}, WireCode.LIMIT),
        (HINT, {"deadline_ms": 0}, WireCode.DEADLINE),
    ],
)
def test_a_bad_header_fails_alone(
    provider: Provider, raw: HintStream, call: Call, changes: dict[str, int], code: WireCode
) -> None:
    raw.send(raw.hint(1, SeededRows(SEED, 0, 5), call, **changes))
    raw.expect_error(1, code)
    assert_goes_on(raw, provider.served_model)


@pytest.mark.parametrize(
    ("first_row", "num_rows"), [(0, 4), (0, 6), (2**40 - 4, 5), (2**64 - 1, 5), (2**64 - 5, 5), (0, 2**64 - 1)]
)
def test_a_seed_that_does_not_fit_fails_alone(
    provider: Provider, raw: HintStream, first_row: int, num_rows: int
) -> None:
    header = raw.hint(1, SeededRows(SEED, 0, 5))[:HEAD_BYTES]
    raw.send(header + SEED + struct.pack("<QQ", first_row, num_rows))
    raw.expect_error(1, WireCode.INVALID_TENSOR)
    assert_goes_on(raw, provider.served_model)


def test_rows_in_place_of_a_seed_fail_alone(provider: Provider, raw: HintStream) -> None:
    raw.send(*raw.request(1, ring_rows(5), HINT))
    raw.expect_error(1, WireCode.INVALID_TENSOR)
    assert_goes_on(raw, provider.served_model)


def test_a_refused_seed_holds_no_place(provider: Provider, raw: HintStream) -> None:
    raw.send(raw.hint(1, SeededRows(SEED, 0, 5), rows=4))
    raw.expect_error(1, WireCode.INVALID_TENSOR)
    assert_goes_on(raw, provider.served_model)
    status = provider.service.status()
    assert (status.num_streams, status.num_requests, status.held_bytes) == (1, 0, 0)


def limited(served_model: ServedModel, limits: Limits) -> ServedModel:
    return ServedModel(
        replace(served_model.served, manifest=served_model.manifest().model_copy(update={"limits": limits}))
    )


def test_a_reply_above_the_limit_is_refused_by_the_header_alone(
    start: Callable[[ServedModel], Provider], tiny_served_model: ServedModel
) -> None:
    provider = start(limited(tiny_served_model, LIMITS.model_copy(update={"max_tensor_bytes": 64 * REPLY_COLS * 4})))
    raw = HintStream(provider)
    raw.send(raw.hint(1, SeededRows(SEED, 0, 65)))
    raw.expect_error(1, WireCode.LIMIT)
    raw.send(raw.hint(2, SeededRows(SEED, 0, 64)))
    assert raw.reply()[1].shape == (64, REPLY_COLS)
    raw.close()


def test_the_reply_counts_as_in_flight(provider: Provider, raw: HintStream) -> None:
    assert 1 < LIMITS.max_in_flight_bytes / (4096 * REPLY_COLS * 4) <= 3
    largest = SeededRows(SEED, 0, 4096)
    for number in (1, 2):
        raw.send(raw.hint(number, largest)[: HEAD_BYTES + 4])  # keep their places until the rest is received
    raw.send(raw.hint(3, largest))
    raw.expect_error(3, WireCode.QUOTA)
    raw.send(Header(FrameType.CANCEL, 1).pack(), raw.hint(4, largest))
    assert raw.reply()[0].request_id == 4


def test_a_cancelled_hint_is_not_answered(provider: Provider, raw: HintStream) -> None:
    raw.send(raw.hint(1, SeededRows(SEED, 0, 5))[: HEAD_BYTES + 4], Header(FrameType.CANCEL, 1).pack())
    assert_goes_on(raw, provider.served_model)


# ---- in process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "reply_cols"), [(HINT, REPLY_COLS), (BACKWARD, COLS)])
def test_the_same_in_process(tiny_served_model: ServedModel, call: Call, reply_cols: int) -> None:
    connection = InprocConnection(tiny_served_model)
    rows = SeededRows(SEED, 11, 6)
    assert torch.equal(ask(connection, rows, call, reply_cols), product_of(tiny_served_model, rows, call))
    assert (connection.traffic.bytes_up, connection.traffic.bytes_down) == (PACKED_BYTES, 6 * reply_cols * 4)


def test_bad_hints_in_process(tiny_served_model: ServedModel) -> None:
    connection = InprocConnection(tiny_served_model)
    rows = SeededRows(SEED, 0, 2)
    seed = SeedPayload(rows, COLS)
    with pytest.raises(UnknownLayer):
        connection.submit(replace(HINT, arithmetic=Arithmetic.FLOAT), seed, REPLY_COLS)
    with pytest.raises(InvalidTensor):
        connection.submit(replace(HINT, purpose=Purpose.PRODUCT), seed, REPLY_COLS)
    with pytest.raises(InvalidTensor):
        connection.submit(HINT, RowsPayload(ring_rows(2)), REPLY_COLS)
    with pytest.raises(InvalidTensor):
        connection.submit(HINT, seed, REPLY_COLS + 1)


def test_a_recorded_hint_is_what_came(tiny_served_model: ServedModel, tmp_path: Path) -> None:
    recording = ServedModel(tiny_served_model.served, Recorder(tmp_path / "seen", tiny_served_model.manifest()))
    rows = SeededRows(SEED, 3, 6)
    reply = InprocConnection(recording).submit(BACKWARD, SeedPayload(rows, REPLY_COLS), COLS).result()
    recording.record("acme", BACKWARD, rows, reply)
    recording.close()
    (line,) = [json.loads(line) for line in (tmp_path / "seen" / "index.jsonl").read_text().splitlines()]
    assert (line["purpose"], line["direction"], line["arithmetic"], line["rows"]) == ("hint", "backward", "ring", 6)
    tensors = load_file(tmp_path / "seen" / line["file"])
    assert bytes(tensors["request"].tolist()) == rows.pack()
    assert torch.equal(tensors["reply"], reply)
