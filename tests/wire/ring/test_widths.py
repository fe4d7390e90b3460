"""Tests numbers of fewer than 32 bits: golden bytes, both forms of packing, rounding, row ends, and the rule of
widths."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.repository import golden_vectors
from tests.support.ring_products import ring_rows
from wire.errors import InvalidTensor
from wire.ring import coding, kernels, widths
from wire.ring.product import product

CASES = golden_vectors("packed.json")
WIDTHS = (16, 24, 26, 28)


@pytest.fixture(params=["compiled", "numpy"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(kernels, "available", lambda: False)
    elif not kernels.available():
        pytest.skip("no compiled kernels here")


def matrix(numbers: list[list[int]]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64).to(torch.int32).view(len(numbers), -1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden(case: dict[str, Any]) -> None:
    rows, bits, expected = matrix(case["rows"]), case["bits"], matrix(case["unpacked"])
    packed = widths.pack(rows, bits)
    assert bytes(packed).hex() == case["packed"]
    assert torch.equal(widths.unpack(packed, *rows.shape, bits), expected)
    assert torch.equal(widths.rounded(rows.clone(), bits), expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_products_of_short_rows_are_exact_and_as_short(case: dict[str, Any]) -> None:
    rows, bits = matrix(case["unpacked"]), case["bits"]
    if not rows.numel():
        pytest.skip("nothing to multiply")
    made = product(rows, torch.tensor(case["weight"], dtype=torch.int8))
    assert torch.equal(made, matrix(case["product"]))
    assert torch.equal(widths.rounded(made.clone(), bits), made)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 8), (3, 63), (7, 64), (2, 65), (300, 1001)])
def test_rows_come_back_rounded(bits: int, shape: tuple[int, int]) -> None:
    rows = ring_rows(*shape, seed=bits)
    before = rows.clone()
    packed = widths.pack(rows, bits)
    assert packed.nbytes == shape[0] * widths.row_bytes(shape[1], bits) == shape[0] * math.ceil(shape[1] * bits / 8)
    assert torch.equal(widths.unpack(packed, *shape, bits), widths.rounded(rows.clone(), bits))
    assert torch.equal(rows, before)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("cols", [0, 1, 7, 64, 65, 1001])
def test_one_row_is_packed_as_a_tensor_is(bits: int, cols: int) -> None:
    row = ring_rows(1, cols, seed=bits)
    expected = widths.pack(row, bits)
    packed = memoryview(bytearray(expected.nbytes))
    widths.pack_row(memoryview(bytearray(row.numpy().tobytes())), cols, bits, packed)
    assert packed == expected
    kept = widths.rounded(row.clone(), bits).numpy().tobytes()
    for memory in (packed, memoryview(bytes(packed))):  # memory that can be written, and that cannot
        assert bytes(widths.unpack_row(memory, cols, bits)) == kept
        assert widths.unpack(memory, 1, cols, bits).numpy().tobytes() == kept
    if cols * bits % 8:
        packed[-1] |= 0x80
        for unpacked in (lambda: widths.unpack_row(packed, cols, bits), lambda: widths.unpack(packed, 1, cols, bits)):
            with pytest.raises(InvalidTensor, match="zero bits at the end"):
                unpacked()


@pytest.mark.parametrize("bits", WIDTHS)
def test_rows_of_any_strides_and_memory_that_cannot_be_written(bits: int) -> None:
    rows = ring_rows(6, 30, seed=2)
    for each in (rows[:, 3:20], rows.t(), rows[::2]):
        packed = widths.pack(each, bits)
        assert torch.equal(
            widths.unpack(memoryview(bytes(packed)), *each.shape, bits), widths.rounded(each.clone(), bits)
        )


@pytest.mark.parametrize("bits", [26, 28])
def test_a_row_that_does_not_end_with_zeros_is_refused(bits: int) -> None:
    packed = widths.pack(ring_rows(3, 5, seed=1), bits)
    row_bytes = len(packed) // 3
    for row in range(3):
        spoilt = bytearray(packed)
        spoilt[(row + 1) * row_bytes - 1] |= 0x80
        with pytest.raises(InvalidTensor, match="zero bits at the end"):
            widths.unpack(memoryview(spoilt), 3, 5, bits)


@pytest.mark.parametrize("bits", [*WIDTHS, 32])
def test_sums_are_rounded_where_they_are(bits: int) -> None:
    mask, rows = ring_rows(9, 70, seed=3), ring_rows(9, 70, seed=4)
    expected = widths.rounded(mask + rows, bits)
    address = mask.data_ptr()
    made = widths.add_rounded(mask, rows, bits)
    assert made.data_ptr() == address
    assert torch.equal(made, expected)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 1), (5, 7), (4, 24)])
def test_a_packed_effect_stands_for_multiples_of_256(shape: tuple[int, int]) -> None:
    """What was packed is rounded to them, mod 2^32, and is taken off replies as it is."""
    effect, reply = ring_rows(*shape, seed=5), ring_rows(*shape, seed=6)
    if effect.numel():
        effect[0, 0] = 2**31 - 1  # this wraps
    packed = widths.pack_effect(effect, torch.empty(shape[0], 3 * shape[1], dtype=torch.uint8))
    expected = widths.rounded(effect.clone(), 24)
    assert torch.equal(widths.unpacked_effect(packed), expected)
    beta = torch.rand(shape[0], 1)
    for given in (packed, torch.cat((packed, packed), dim=1)[:, : packed.shape[1]]):
        assert torch.equal(coding.decode(reply, beta, None, given), coding.decode(reply, beta, None, expected))


def test_the_kernels_refuse_what_does_not_fit() -> None:
    if not kernels.available():
        pytest.skip("no compiled kernels here")
    rows = ring_rows(2, 8)
    for bits in (14, 25, 34):
        with pytest.raises(InvalidTensor):
            kernels.pack(rows, bits, memoryview(bytearray(2 * 8 * bits // 8)))
    for packed in (memoryview(bytearray(47)), memoryview(bytes(48))):
        with pytest.raises(InvalidTensor):
            kernels.pack(rows, 24, packed)
    with pytest.raises(InvalidTensor):
        kernels.unpack(memoryview(bytearray(47)), 24, 2, 8)
    with pytest.raises(InvalidTensor):
        kernels.add(rows, ring_rows(2, 7), 24)
    numbers, packed = memoryview(bytearray(32)), memoryview(bytearray(24))
    for other in (
        memoryview(bytearray(23)),
        memoryview(bytearray(25)),
        memoryview(bytes(24)),
        memoryview(bytearray(48))[::2],
    ):
        with pytest.raises(InvalidTensor):
            kernels.pack_row(numbers, 24, other)
        with pytest.raises(InvalidTensor):
            kernels.unpack_row(other, 24, numbers)
    for other in (memoryview(bytearray(33)), memoryview(bytes(32)), memoryview(bytearray(64))[::2], memoryview(b"")):
        with pytest.raises(InvalidTensor):
            kernels.pack_row(other, 24, packed)
        with pytest.raises(InvalidTensor):
            kernels.unpack_row(packed, 24, other)


def test_the_rule_of_widths() -> None:
    """The share that rounding makes up is √d · norm · 2^(32 − w) / (√12 · 2^31), and the width the smallest that
    fits."""

    def share(bits: int, features: int, norm: float) -> float:
        return 2.0 ** (32 - bits) * math.sqrt(features) * norm / (math.sqrt(12) * 2.0**31)

    seen = set()
    for features in (64, 576, 1536, 4096, 11008, 1 << 20):
        for norm in (1.0, 50.0, 127.0, 40 * math.sqrt(features), 127 * math.sqrt(features)):
            bits = widths.enough_bits(features, norm, 1.25e-3)
            seen.add(bits)
            narrower = [each for each in (24, 26, 28) if each < bits]
            assert bits == 32 or share(bits, features, norm) <= 1.25e-3
            assert all(share(each, features, norm) > 1.25e-3 for each in narrower)
    assert seen == {24, 26, 28, 32}
