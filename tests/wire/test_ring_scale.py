"""Tests scales: no product wraps, for any rows, and results are as exact as rounding allows."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.compiled_kernels import compiled_and_torch, needs_products
from wire.errors import InvalidTensor, MaskOverflow
from wire.ring import coding, kernels
from wire.ring.quantise import INT8_MAX, max_norms, quantise
from wire.ring.widths import pack_effect

LIMIT = 2**31
LARGEST = float(np.finfo(np.float32).max)
KINDS = (
    "plain", "aligned", "worst column", "outliers", "zeros", "denormals", "1e30", "1e-30", "largest", "one number",
    "equal",
)  # fmt: skip


_each_form = compiled_and_torch(kernels, needs_products)


pytestmark = pytest.mark.usefixtures("_each_form")


def adversarial_rows(kind: str, weight: torch.Tensor, num_rows: int, generator: torch.Generator) -> torch.Tensor:
    """Returns float32 rows, shape (num_rows, d), that are near the bound or near the largest and smallest float32
    numbers."""
    d, m = weight.shape
    rows = torch.randn(num_rows, d, generator=generator)
    if kind == "aligned":  # the product of such a row is its norm times the column's
        return weight[:, torch.randint(m, (num_rows,), generator=generator)].t().to(torch.float32) * 0.37
    if kind == "worst column":
        longest = weight.to(torch.float64).square().sum(0).argmax()
        return weight[:, longest].to(torch.float32).expand(num_rows, d) * torch.rand(num_rows, 1, generator=generator)
    if kind == "outliers":
        return torch.where(torch.rand(num_rows, d, generator=generator) < 0.1, rows * 1e4, rows)
    if kind == "one number":
        one = torch.zeros(num_rows, d)
        one[:, 0] = rows[:, 0]
        return one
    if kind == "equal":
        return torch.full((num_rows, d), 0.1)
    scales = {"zeros": 0.0, "denormals": 1e-42, "1e30": 1e30, "1e-20": 1e-20, "1e-30": 1e-30, "largest": math.inf}
    return (rows * scales.get(kind, 1.0)).nan_to_num(0.0, LARGEST, -LARGEST)


def random_weight(d: int, m: int, kind: str, generator: torch.Generator) -> torch.Tensor:
    if kind == "full":
        return torch.where(torch.rand(d, m, generator=generator) < 0.5, -127, 127).to(torch.int8)
    if kind == "zeros":
        return torch.zeros(d, m, dtype=torch.int8)
    return quantise(torch.randn(d, m, generator=generator))[0]


def check_bound(encoded: torch.Tensor, weight_norm: float, error_norm: float, slack: float) -> None:
    """Checks (‖x̃‖ + error_norm) · weight_norm + slack < 2^31 in exact fractions."""
    room = (LIMIT - Fraction(slack)) / Fraction(weight_norm) - Fraction(error_norm)
    assert room > 0
    for row in encoded.tolist():
        assert sum(number * number for number in row) < room * room


def worst_products(encoded: torch.Tensor, weight: torch.Tensor, error_norm: float) -> int:
    """Returns the largest |(x̃ + e)·w| over all columns w, with the worst integer e of at most this norm."""
    largest = 0
    columns = weight.t().tolist()
    for row in encoded.tolist():
        for column in columns:
            length = math.sqrt(sum(w * w for w in column)) or 1.0
            value = sum(a * b for a, b in zip(row, column, strict=True))
            sign = 1 if value >= 0 else -1
            error = [sign * int(error_norm * w / length) for w in column]
            largest = max(largest, abs(value + sum(a * b for a, b in zip(error, column, strict=True))))
    return largest


@given(
    kind=st.sampled_from(KINDS),
    weight_kind=st.sampled_from(["random", "full", "zeros"]),
    d=st.integers(1, 48),
    m=st.integers(1, 12),
    num_rows=st.integers(0, 3),
    error_norm=st.floats(0, 1e4),
    slack=st.floats(0, 2.0**29),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=200, deadline=None)
def test_no_product_wraps(
    kind: str, weight_kind: str, d: int, m: int, num_rows: int, error_norm: float, slack: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = random_weight(d, m, weight_kind, generator)
    rows = adversarial_rows(kind, weight, num_rows, generator)
    weight_norm, _ = max_norms(weight)
    encoded, beta = coding.encode(rows, weight_norm, error_norm, slack)
    assert encoded.dtype == torch.int32
    assert beta.dtype == torch.float32
    assert beta.shape == (num_rows, 1)
    assert bool(torch.isfinite(beta).all())
    assert bool((beta > 0).all())
    check_bound(encoded, weight_norm, error_norm, slack)
    assert worst_products(encoded, weight, error_norm) + slack < LIMIT


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "largest"])  # its true result is no float32
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_result_is_within_rounding(kind: str, direction: str) -> None:
    generator = torch.Generator().manual_seed(11)
    quantised, alpha = quantise(torch.randn(96, 40, generator=generator))
    column_norm, row_norm = max_norms(quantised)
    weight, norm, scales = (
        (quantised, column_norm, alpha) if direction == "forward" else (quantised.t(), row_norm, None)
    )
    rows = adversarial_rows(kind, weight, 5, generator)
    encoded, beta = coding.encode(rows, norm)
    got = coding.decode(coding.product(encoded, weight), beta, scales)
    assert got.dtype == torch.float32
    wide = weight.to(torch.float64)
    factor = torch.ones(weight.shape[1], dtype=torch.float64) if scales is None else scales.to(torch.float64)
    exact = rows.to(torch.float64) @ wide * factor
    rounding = 0.5001 * beta.to(torch.float64) * wide.abs().sum(0) * factor
    float_rounding = 4e-7 * (rows.to(torch.float64).abs() @ wide.abs()) * factor
    assert bool(((got.to(torch.float64) - exact).abs() <= rounding + float_rounding + 2.0**-148).all())


def test_rounding_every_number_up_stays_within_the_bound() -> None:
    """Rows of equal numbers move farthest when they are rounded, by up to a half in every coordinate."""
    most = 0.0
    for d in range(1000, 1100):
        weight_norm = 127 * math.sqrt(d)
        encoded, _ = coding.encode(torch.ones(1, d), weight_norm)
        most = max(most, float(encoded.double().norm()) * weight_norm)
    assert 2.0**31 - 2e4 < most < 2.0**31


@pytest.mark.parametrize("kind", ["plain", "outliers", "1e30", "1e-20"])
def test_the_scale_wastes_no_bits(kind: str) -> None:
    # the smallest allowed β: the norm of x̃ comes within a percent of the budget
    generator = torch.Generator().manual_seed(12)
    weight = random_weight(512, 8, "random", generator)
    norm, _ = max_norms(weight)
    encoded, _ = coding.encode(adversarial_rows(kind, weight, 4, generator), norm)
    norms = torch.linalg.vector_norm(encoded.to(torch.float64), dim=1)
    assert float(norms.min()) > 0.99 * LIMIT / norm


def test_a_single_number_under_weight_norm_one_stays_an_int32() -> None:
    for value in (1.0, -1.0, LARGEST, -LARGEST, 1e-20, 3.0000002):
        encoded, _ = coding.encode(torch.tensor([[value]]), 1.0)
        check_bound(encoded, 1.0, 0.0, 0.0)
        assert (int(encoded) > 0) == (value > 0)


def test_the_smallest_rows_lose_bits_but_never_their_bound() -> None:
    # below a norm of 2^-100 times the budget the scale no longer follows the row
    encoded, beta = coding.encode(torch.tensor([[2.0**-90], [2.0**-149]]), 1024.0)
    assert encoded.tolist() == [[1 << 10], [0]]
    assert beta.tolist() == [[2.0**-100], [2.0**-100]]


def test_zeros_are_zeros() -> None:
    encoded, beta = coding.encode(torch.zeros(2, 5), 10.0)
    assert not encoded.any()
    assert torch.equal(coding.decode(encoded, beta, torch.ones(5)), torch.zeros(2, 5))


def test_each_row_has_its_own_scale() -> None:
    rows = torch.tensor([[1.0, 0.0], [1e-20, 0.0], [1e20, 0.0]])
    encoded, beta = coding.encode(rows, 127.0)
    alone = [coding.encode(row[None], 127.0) for row in rows]
    assert torch.equal(encoded, torch.cat([one for one, _ in alone]))
    assert torch.equal(beta, torch.cat([one for _, one in alone]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_float_types(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(13)
    rows = torch.randn(3, 64, generator=generator).to(dtype)
    encoded, beta = coding.encode(rows, 127.0 * 8)
    check_bound(encoded, 127.0 * 8, 0.0, 0.0)
    torch.testing.assert_close(coding.decode(encoded, beta), rows.to(torch.float32), rtol=1e-4, atol=1e-5)


def test_rows_of_any_layout() -> None:
    rows = torch.randn(64, 6, generator=torch.Generator().manual_seed(14)).t()
    encoded, beta = coding.encode(rows, 500.0)
    again, beta_again = coding.encode(rows.contiguous(), 500.0)
    assert torch.equal(encoded, again)
    assert torch.equal(beta, beta_again)


def test_centred_at_both_ends() -> None:
    reply = torch.tensor([[-(2**31), 2**31 - 1, -1, 0]], dtype=torch.int32)
    decoded = coding.decode(reply, torch.tensor([[2.0]]), torch.tensor([1.0, 1.0, 0.5, 1.0]))
    assert decoded.tolist() == [[-(2.0**32), 2.0**32, -1.0, 0.0]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_refuses_what_is_not_finite(bad: float) -> None:
    rows = torch.ones(3, 4)
    rows[2, 1] = bad
    with pytest.raises(InvalidTensor, match="nothing was sent") as caught:
        coding.encode(rows, 10.0)
    assert not any(word in str(caught.value) for word in ("nan,", "inf,", "tensor("))


@pytest.mark.parametrize(
    ("d", "weight_norm", "error_norm", "slack"),
    [
        (4, 2.0**31, 0.0, 0.0),
        (4, 10.0, 2.0**31 / 10, 0.0),
        (4, 10.0, 0.0, 2.0**31),
        (4, 10.0, 0.0, 2.0**32),
        (1 << 22, INT8_MAX * 2048.0, 8000.0, 0.0),
    ],
)
def test_overflow_is_refused(d: int, weight_norm: float, error_norm: float, slack: float) -> None:
    with pytest.raises(MaskOverflow, match=f"{d} inputs"):
        coding.encode(torch.ones(1, d), weight_norm, error_norm, slack)


def test_the_widest_layer_of_the_manifest_has_room() -> None:
    d = 1 << 22
    encoded, _ = coding.encode(torch.full((1, d), LARGEST), INT8_MAX * 2048.0)
    assert int(encoded.to(torch.int64).square().sum()) < (LIMIT / (INT8_MAX * 2048.0)) ** 2


def test_no_rows() -> None:
    encoded, beta = coding.encode(torch.empty(0, 7), 10.0)
    assert encoded.shape == (0, 7)
    assert coding.decode(coding.product(encoded, torch.ones(7, 3, dtype=torch.int8)), beta).shape == (0, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_no_product_wraps_on_cuda(kind: str) -> None:
    generator = torch.Generator().manual_seed(15)
    weight = random_weight(64, 9, "full", generator)
    norm, _ = max_norms(weight)
    encoded, beta = coding.encode(adversarial_rows(kind, weight, 4, generator).cuda(), norm, 100.0, 1e6)
    check_bound(encoded.cpu(), norm, 100.0, 1e6)
    assert bool(torch.isfinite(beta).all())


@needs_products
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(("num_rows", "d"), [(0, 5), (1, 1), (1, 577), (5, 8), (33, 31), (300, 900)])
def test_both_forms_give_the_same_bits(
    kind: str, num_threads: int, num_rows: int, d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    generator = torch.Generator().manual_seed(d)
    weight = torch.randint(-127, 128, (d, 9), generator=generator).to(torch.int8)
    rows = adversarial_rows(kind, weight, num_rows, generator).clamp(-1e30, 1e30)
    alpha = torch.rand(d, generator=generator) + 0.01
    reply = torch.randint(-(2**31), 2**31, (num_rows, d), generator=generator).to(torch.int32)
    effect = torch.randint(-(2**31), 2**31, (num_rows, d + 3), generator=generator).to(torch.int32)[:, 3:]

    def all_of_it() -> list[torch.Tensor]:
        plain, by_alpha = coding.encode(rows, 1000.0, 3.0, 1e5), coding.encode(rows, 50.0, 0.0, 0.0, alpha)
        scales = torch.linspace(1e-20, 1e20, num_rows)[:, None]
        decoded = [coding.decode(reply, scales, *more) for more in ((), (alpha,), (None, effect), (alpha, effect))]
        return [*plain, *by_alpha, *decoded]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "available", lambda: False)
        by_torch = all_of_it()
    compiled = all_of_it()
    for number, (mine, other) in enumerate(zip(compiled, by_torch, strict=True)):
        if number in (1, 3):  # a norm may be summed in another order
            torch.testing.assert_close(mine, other, rtol=2e-7, atol=0)
        elif number in (0, 2):
            same = (compiled[number + 1] == by_torch[number + 1]).flatten()
            assert bool(same.any()) or not num_rows
            assert torch.equal(mine[same], other[same])
        else:
            assert torch.equal(mine, other)


@needs_products
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [(0, 0), (299, 899), (150, 7)])
def test_each_row_is_looked_at(value: float, place: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    rows = torch.ones(300, 900)
    rows[place] = value
    with pytest.raises(InvalidTensor, match="NaN or infinity"):
        coding.encode(rows, 10.0)


@needs_products
def test_what_overflows_by_alpha_is_infinite() -> None:
    with pytest.raises(InvalidTensor, match="NaN or infinity"):
        coding.encode(torch.full((2, 3), LARGEST), 10.0, alpha=torch.tensor([1.0, 2.0, 1.0]))


@needs_products
@pytest.mark.parametrize("alpha", [torch.ones(2), torch.ones(3, dtype=torch.float64), torch.ones(6)[::2]])
def test_scales_that_do_not_fit_are_refused(alpha: torch.Tensor) -> None:
    with pytest.raises(InvalidTensor):
        kernels.encode(torch.ones(2, 3), alpha, 1000.0, 1e-30, torch.empty(2, 3, dtype=torch.int32))
    with pytest.raises(InvalidTensor):
        kernels.decode(torch.ones(2, 3, dtype=torch.int32), None, torch.ones(2, 1), alpha)


def test_a_whole_effect_does_not_outlive_its_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would unmask the row, and its memory is used again."""
    seen, unpacked = list[torch.Tensor](), coding.unpacked_effect
    monkeypatch.setattr(coding.kernels, "available", lambda: False)
    monkeypatch.setattr(coding, "unpacked_effect", lambda packed: seen.append(unpacked(packed)) or seen[-1])
    effect = torch.tensor([[256, -512, 1024]], dtype=torch.int32)
    found = coding.decode(
        effect + 3, torch.ones(1, 1), effect=pack_effect(effect, torch.empty(1, 9, dtype=torch.uint8))
    )
    assert found.tolist() == [[3.0, 3.0, 3.0]]
    assert [int(each.count_nonzero()) for each in seen] == [0]
