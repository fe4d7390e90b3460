"""Tests seeded rows: golden vectors, that rows depend only on seed and row number, bounds, and that seeds are never
shown."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import struct
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.repository import ROOT, golden_vectors
from wire import frame
from wire.errors import InvalidTensor, MalformedFrame
from wire.frame import Arithmetic, Call, Direction, FrameType, Header, Purpose
from wire.limits import deadline_s
from wire.ring import coding
from wire.ring.seeded_rows import PACKED_BYTES, SeededRows

CASES = golden_vectors("expand.json")
SEED = bytes(range(32))
PROTOCOL = ROOT / "docs" / "protocol.md"
seeds = st.binary(min_size=32, max_size=32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden(case: dict[str, Any]) -> None:
    rows = SeededRows(bytes.fromhex(case["seed"]), case["first_row"], case["num_rows"])
    expanded = rows.expand(case["features"])
    assert expanded.shape == (case["num_rows"], case["features"])
    assert expanded.tolist() == case["rows"]
    assert rows.pack().hex() == case["payload"]
    assert SeededRows.unpack(bytes.fromhex(case["payload"])) == rows


@given(seeds, st.integers(0, 2**40 - 9), st.integers(0, 9), st.integers(0, 70), st.integers(0, 70))
@settings(max_examples=100, deadline=None)
def test_fewer_features_are_the_first_columns(seed: bytes, first: int, count: int, some: int, more: int) -> None:
    few, many = sorted((some, more))
    rows = SeededRows(seed, first, count)
    assert torch.equal(rows.expand(few), rows.expand(many)[:, :few])


@given(seeds, st.integers(0, 2**40 - 9), st.integers(1, 9), st.integers(1, 40), st.integers(1, 10))
@settings(max_examples=100, deadline=None)
def test_any_range_can_be_made_alone(seed: bytes, first: int, count: int, features: int, size: int) -> None:
    whole = SeededRows(seed, first, count)
    parts = list(whole.split(size))
    assert [part.num_rows for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert torch.equal(torch.cat([part.expand(features) for part in parts]), whole.expand(features))


@pytest.mark.parametrize(
    ("features", "num_rows"), [(1, 40_000), (4, 16_384), (7, 8_193), (300, 500), (65_536, 2), (70_000, 3)]
)
def test_pieces_do_not_show(features: int, num_rows: int) -> None:
    """A seed is expanded in pieces of 256 KiB, or of one row if a row is larger. With several pieces, the rows are the
    same."""
    rows = SeededRows(SEED, 2**32 - 5, num_rows)
    parts = torch.cat([part.expand(features) for part in rows.split(max(1, num_rows // 37))])
    assert torch.equal(rows.expand(features), parts)


@pytest.mark.parametrize("features", [5, 8])
def test_the_result_is_an_ordinary_tensor_of_its_own(features: int) -> None:
    rows = SeededRows(SEED, 0, 3)
    expanded = rows.expand(features)
    assert (expanded.dtype, expanded.is_contiguous()) == (torch.int32, True)
    expanded.zero_()
    assert rows.expand(features).any()


def test_every_row_and_seed_gives_other_numbers() -> None:
    one, other = SeededRows(SEED, 0, 64).expand(64), SeededRows(bytes(32), 0, 64).expand(64)
    # a false alarm has probability 4096 · 2^-32 for the first line, and the seeds are fixed
    assert not (one == other).any()
    assert len({tuple(row) for row in torch.cat((one, other)).tolist()}) == 128
    assert abs(one.to(torch.float64).mean().item()) < 6 * 2**32 / (12 * 4096) ** 0.5  # six standard errors


def test_nothing_to_split() -> None:
    assert list(SeededRows(SEED, 3, 0).split(5)) == []


# ---- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first_row", "num_rows"), [(0, 0), (2**40, 0), (0, 2**40), (2**40 - 1, 1)])
def test_accepts_rows_up_to_the_bound(first_row: int, num_rows: int) -> None:
    rows = SeededRows(SEED, first_row, num_rows)
    assert SeededRows.unpack(rows.pack()) == rows


@pytest.mark.parametrize(("first_row", "num_rows"), [(-1, 1), (0, -1), (2**40, 1), (1, 2**40), (2**63, 2**63)])
def test_refuses_rows_beyond_it(first_row: int, num_rows: int) -> None:
    with pytest.raises(InvalidTensor, match="within 0 and 2\\^40"):
        SeededRows(SEED, first_row, num_rows)


@pytest.mark.parametrize("seed", [b"", bytes(31), bytes(33), "0" * 32, bytearray(32)])
def test_refuses_other_seeds(seed: Any) -> None:
    with pytest.raises(InvalidTensor, match="32 bytes"):
        SeededRows(seed, 0, 1)


@pytest.mark.parametrize("length", [0, 32, 47, 49, 96])
def test_refuses_payloads_of_another_length(length: int) -> None:
    with pytest.raises(MalformedFrame, match=f"48 bytes, got {length}"):
        SeededRows.unpack(bytes(length))


@pytest.mark.parametrize(
    ("first_row", "num_rows"), [(2**40, 1), (2**64 - 1, 1), (0, 2**64 - 1), (2**64 - 1, 2**64 - 1)]
)
def test_refuses_payloads_with_rows_beyond_the_bound(first_row: int, num_rows: int) -> None:
    with pytest.raises(InvalidTensor):
        SeededRows.unpack(SEED + struct.pack("<QQ", first_row, num_rows))


@pytest.mark.parametrize("features", [-1, 2**22 + 1, 2**70])
def test_refuses_features_out_of_range(features: int) -> None:
    with pytest.raises(InvalidTensor, match="features"):
        SeededRows(SEED, 0, 1).expand(features)


# ---- seeds stay where they are ---------------------------------------------------------------------------------------


def test_a_seed_is_not_shown() -> None:
    seed = os.urandom(32)
    rows = SeededRows(seed, 1, 2)
    assert repr(rows) == str(rows) == "SeededRows(first_row=1, num_rows=2)"
    with pytest.raises(InvalidTensor) as caught:
        replace(rows, first_row=2**40)
    assert seed.hex() not in str(caught.value)
    assert str(seed) not in str(caught.value)


@pytest.mark.parametrize("write", [pickle.dumps, copy.copy, copy.deepcopy, json.dumps])
def test_a_seed_is_not_written_down(write: Any) -> None:
    with pytest.raises(TypeError):
        write(SeededRows(SEED, 0, 1))


# ---- docs/protocol.md ------------------------------------------------------------------------------------------------


def test_the_example_of_the_protocol_page() -> None:
    shown = [
        bytes.fromhex(body)
        for body in re.findall(r"^```text hint\n(.*?)^```$", PROTOCOL.read_text(), re.MULTILINE | re.DOTALL)
    ]
    call = Call(7, Direction.FORWARD, Arithmetic.RING, Purpose.HINT)
    rows = SeededRows(SEED, 0, 2)
    weight = torch.tensor([[1, -2], [3, 4], [-127, 5]], dtype=torch.int8)
    reply = coding.product(rows.expand(3), weight)
    request = Header(FrameType.REQUEST, 2, call, 2, 3, 0, PACKED_BYTES, int(1000 * deadline_s(PACKED_BYTES + 16)))
    assert shown == [
        b"".join(frame.frames(request, frame.rows_bytes(rows))),
        frame.tensor_bytes(rows.expand(3)).tobytes(),
        b"".join(frame.frames(Header(FrameType.REPLY, 2, call, 2, 2, 0, 16), frame.tensor_bytes(reply))),
    ]
