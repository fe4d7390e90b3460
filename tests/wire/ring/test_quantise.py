"""Tests the normative quantiser: golden vectors, its error bound, the inputs that it refuses, and its bounds on
norms."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.repository import golden_vectors
from wire.errors import InvalidTensor
from wire.ring.quantise import INT8_MAX, column_norms, digest, max_norms, quantise, square_sums

CASES = golden_vectors("quantise.json")
LARGEST = float(np.finfo(np.float32).max)
WEIGHTS = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=12),
    elements=st.floats(-LARGEST, LARGEST, width=32) | st.floats(-2, 2, width=32) | st.just(0.0),
)


def bits(numbers: torch.Tensor) -> Any:
    """Returns float32 numbers as hex digits, nested like the tensor."""
    if numbers.dim():
        return [bits(part) for part in numbers]
    return struct.pack(">f", float(numbers)).hex()


def floats(digits: list[list[str]]) -> torch.Tensor:
    return torch.tensor([[struct.unpack(">f", bytes.fromhex(number))[0] for number in row] for row in digits])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden(case: dict[str, Any]) -> None:
    weight = floats(case["weight"])
    for given_weight in (weight, weight.t().contiguous().t()):  # nn.Linear comes as a transposed view
        quantised, alpha = quantise(given_weight)
        assert quantised.dtype == torch.int8
        assert quantised.is_contiguous()
        assert quantised.tolist() == case["quantised"]
        assert bits(alpha) == case["alpha"]
        assert digest(quantised, alpha) == case["digest"]
    squares = [sum(number * number for number in column) for column in zip(*case["quantised"], strict=True)]
    with np.errstate(over="ignore"):  # of the largest numbers it is infinite
        norms = [np.float32(math.sqrt(square) * scale) for square, scale in zip(squares, alpha.tolist(), strict=True)]
    assert column_norms(quantised, alpha).tolist() == norms
    column, row = max_norms(quantised)
    assert Fraction(column) ** 2 >= case["largest_squared_column_norm"]
    assert Fraction(row) ** 2 >= case["largest_squared_row_norm"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_golden_on_cuda(case: dict[str, Any]) -> None:
    quantised, alpha = quantise(floats(case["weight"]).cuda())
    assert quantised.tolist() == case["quantised"]
    assert bits(alpha.cpu()) == case["alpha"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_types_go_through_float32(dtype: torch.dtype) -> None:
    weight = torch.randn(9, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    quantised, alpha = quantise(weight)
    expected, expected_alpha = quantise(weight.to(torch.float32))
    assert torch.equal(quantised, expected)
    assert torch.equal(alpha, expected_alpha)


@given(WEIGHTS)
@settings(max_examples=150, deadline=None)
def test_error_is_at_most_half_a_step(array: np.ndarray) -> None:
    quantised, alpha = quantise(torch.from_numpy(array))
    assert int(quantised.abs().max()) <= INT8_MAX
    for i, j in np.ndindex(array.shape):
        step = Fraction(float(alpha[j]))
        error = abs(Fraction(float(array[i, j])) - int(quantised[i, j]) * step)
        # one fp32 rounding of a quotient of at most 127, and one of alpha where the quotient is clamped
        assert error <= step / 2 * (1 + Fraction(1, 2**15))


@given(WEIGHTS)
@settings(max_examples=100, deadline=None)
def test_norms_are_upper_bounds_and_possible(array: np.ndarray) -> None:
    quantised, _ = quantise(torch.from_numpy(array))
    numbers = quantised.to(torch.int64)
    column, row = max_norms(quantised)
    for bound, dim in ((column, 0), (row, 1)):
        assert Fraction(bound) ** 2 >= int((numbers**2).sum(dim).max())
        assert 1.0 <= bound <= INT8_MAX * quantised.shape[dim] ** 0.5 * (1 + 1e-9)


def test_norms_of_a_layer_wider_than_one_block() -> None:
    quantised = torch.full((3, 9000), 127, dtype=torch.int8)
    quantised[1] = -127
    column, row = max_norms(quantised)
    assert 127**2 * 3 <= Fraction(column) ** 2 <= 127**2 * 3 * (1 + Fraction(1, 10**12))
    assert 127**2 * 9000 <= Fraction(row) ** 2 <= 127**2 * 9000 * (1 + Fraction(1, 10**12))


class Doubles(TorchDispatchMode):
    """Notes the most float64 numbers of one tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype == torch.float64:
            self.most = max(self.most, made.numel())
        return made


def test_sums_of_a_tall_weight_take_no_more_memory_than_of_a_wide_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wire.ring.quantise.MOST_SQUARES", 1000)
    for shape in ((900, 70), (70, 900), (3000, 2)):
        weight = torch.randint(-127, 128, shape, dtype=torch.int8)
        with Doubles() as made:
            columns, rows = square_sums(weight)
        assert made.most <= max(1000, shape[0])
        squares = weight.to(torch.int64).square()
        assert (columns.tolist(), rows.tolist()) == (squares.sum(dim=0).tolist(), squares.sum(dim=1).tolist())


def test_norms_of_zeros_leave_a_scale() -> None:
    assert max_norms(torch.zeros(4, 4, dtype=torch.int8)) == (1.0, 1.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_refuses_what_is_not_finite(bad: float) -> None:
    weight = torch.ones(3, 3)
    weight[1, 2] = bad
    with pytest.raises(InvalidTensor, match="NaN or infinity"):
        quantise(weight)


def test_refuses_a_double_beyond_float32() -> None:
    with pytest.raises(InvalidTensor):
        quantise(torch.full((2, 2), 1e300, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4), ()])
def test_refuses_what_is_no_matrix(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidTensor, match=f"{len(shape)} dimensions"):
        quantise(torch.ones(shape))


def test_alpha_is_a_true_quotient() -> None:
    # A product with the reciprocal of 127, which CUDA takes for plain numbers, differs in the last bit for these.
    largest = np.random.default_rng(0).uniform(0.01, 100, 4096).astype(np.float32)
    by_reciprocal = largest * (np.float32(1) / np.float32(127))
    _, alpha = quantise(torch.from_numpy(largest).view(1, -1))
    assert np.array_equal(alpha.numpy(), largest / np.float32(127))
    assert not np.array_equal(alpha.numpy(), by_reciprocal)


def test_digest_reads_row_major_whatever_the_layout() -> None:
    quantised, alpha = quantise(torch.randn(5, 7, generator=torch.Generator().manual_seed(1)))
    assert digest(quantised.t().contiguous().t(), alpha) == digest(quantised, alpha)
    assert digest(quantised, alpha) != digest(quantised.t().contiguous(), alpha)
