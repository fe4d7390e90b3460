"""The product mod 2^32: equal to big integers for every shape, layout and value, by either kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vectors import load
from wire import ring
from wire.errors import InvalidTensor

LOWEST, HIGHEST = -(2**31), 2**31 - 1
EXTREMES = torch.tensor([LOWEST, LOWEST + 1, -65536, -256, -255, -1, 0, 1, 255, 256, HIGHEST - 1, HIGHEST])
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
needs_int_mm = pytest.mark.skipif(not ring.int_mm_is_exact(), reason="this machine's _int_mm is not exact")
KERNELS = [ring.product, ring._product_by_float64, pytest.param(ring._product_by_limbs, marks=needs_int_mm)]


def reference(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Python integers."""
    exact = rows.numpy().astype(object) @ weight.numpy().astype(object)
    centred = (exact + 2**31) % 2**32 - 2**31
    return torch.from_numpy(np.asarray(centred, dtype=np.int64)).to(torch.int32).view(rows.shape[0], weight.shape[1])


def laid_out(matrix: torch.Tensor, layout: str) -> torch.Tensor:
    """The same numbers in another memory order."""
    if layout == "transposed":
        return matrix.t().contiguous().t()
    if layout == "strided":
        wide = torch.zeros(matrix.shape[0] * 2, matrix.shape[1] * 3, dtype=matrix.dtype)
        view = wide[::2, ::3]
        return view.copy_(matrix)
    if layout == "columns":
        wide = torch.zeros(matrix.shape[0], matrix.shape[1] + 5, dtype=matrix.dtype)
        return wide[:, 2 : 2 + matrix.shape[1]].copy_(matrix)
    return matrix.contiguous()


def draw(num_rows: int, d: int, m: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Half random numbers, half extremes."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(LOWEST, HIGHEST + 1, (num_rows, d), generator=generator)
    extremes = EXTREMES[torch.randint(len(EXTREMES), (num_rows, d), generator=generator)]
    rows = torch.where(torch.rand(num_rows, d, generator=generator) < 0.5, rows, extremes).to(torch.int32)
    weight = torch.randint(-127, 128, (d, m), generator=generator)
    weight = torch.where(torch.rand(d, m, generator=generator) < 0.3, torch.where(weight < 0, -127, 127), weight)
    return rows, weight.to(torch.int8)


LAYOUTS = st.sampled_from(["contiguous", "transposed", "strided", "columns"])


@given(
    num_rows=st.integers(0, 6),
    d=st.integers(1, 70),
    m=st.integers(1, 40),
    seed=st.integers(0, 2**32),
    row_layout=LAYOUTS,
    weight_layout=LAYOUTS,
)
@settings(max_examples=250, deadline=None)
def test_equals_big_integers(num_rows: int, d: int, m: int, seed: int, row_layout: str, weight_layout: str) -> None:
    rows, weight = draw(num_rows, d, m, seed)
    expected = reference(rows, weight)
    rows, weight = laid_out(rows, row_layout), laid_out(weight, weight_layout)
    before = rows.clone()
    assert torch.equal(ring.product(rows, weight), expected)
    assert torch.equal(ring._product_by_float64(rows, weight), expected)
    if num_rows and d > 1 and m > 1 and ring.int_mm_is_exact():  # the shapes for which `product` takes it
        assert torch.equal(ring._product_by_limbs(rows, weight), expected)
    assert torch.equal(rows, before)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", load("ring.json"), ids=lambda case: case["name"])
def test_golden(case: dict[str, Any], kernel: Product) -> None:
    rows = torch.tensor(case["rows"], dtype=torch.int32)
    weight = torch.tensor(case["weight"], dtype=torch.int8)
    if kernel is ring._product_by_limbs and min(weight.shape) == 1:
        pytest.skip("`product` does not give it size-1 dimensions")
    assert kernel(rows, weight).tolist() == case["product"]
    assert kernel(rows, weight.t().contiguous().t()).tolist() == case["product"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("value", [LOWEST, HIGHEST, -1])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_extremes_beyond_one_float64_block(kernel: Product, value: int, num_rows: int) -> None:
    # 2^31 · 127 · 70,000 is past 2^53, and 255 · 127 · 70,000 past 2^31: both kernels must have split or wrapped.
    d = 70_000
    rows = torch.full((num_rows, d), value, dtype=torch.int32)
    weight = torch.full((d, 3), 127, dtype=torch.int8)
    weight[:, 1] = -127
    weight[::2, 2] = -127
    expected = [(value * total + 2**31) % 2**32 - 2**31 for total in (127 * d, -127 * d, 0)]
    assert kernel(rows, weight).tolist() == [expected] * num_rows


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("d", [2**15 - 1, 2**15, 2**15 + 1])
def test_around_the_float64_split(kernel: Product, d: int) -> None:
    rows, weight = draw(2, d, 3, seed=d)
    assert torch.equal(kernel(rows, weight), reference(rows, weight))


def test_adding_masks_and_taking_them_off_is_exact() -> None:
    rows, weight = draw(4, 50, 9, seed=1)
    noise, _ = draw(4, 50, 9, seed=2)
    assert torch.equal(ring.product(rows + noise, weight) - ring.product(noise, weight), ring.product(rows, weight))


def test_masked_rows_leave_the_callers_rows_alone() -> None:
    rows, weight = draw(3, 8, 8, seed=5)
    kept = rows.clone()
    rows.requires_grad_(False)
    ring.product(rows, weight).zero_()
    assert torch.equal(rows, kept)


@pytest.fixture
def _fresh_self_test() -> Iterator[None]:
    ring.int_mm_is_exact.cache_clear()
    yield
    ring.int_mm_is_exact.cache_clear()


def saturating(limbs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As on processors without VNNI: sums of neighbours saturate at 16 bits."""
    pairs = limbs.to(torch.int64)[:, :, None] * weight.to(torch.int64)[None]
    return (pairs[:, ::2] + pairs[:, 1::2]).clamp(-(2**15), 2**15 - 1).sum(1).to(torch.int32)


def missing(limbs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("_int_mm is not implemented")


@pytest.mark.usefixtures("_fresh_self_test")
@pytest.mark.parametrize("kernel", [saturating, missing])
def test_falls_back_where_the_private_kernel_is_wrong(kernel: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_int_mm", kernel)
    assert not ring.int_mm_is_exact()
    rows, weight = draw(3, 20, 6, seed=3)
    assert torch.equal(ring.product(rows, weight), reference(rows, weight))


@pytest.mark.usefixtures("_fresh_self_test")
def test_falls_back_where_the_private_kernel_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_int_mm")
    assert not ring.int_mm_is_exact()


@pytest.mark.parametrize(
    ("rows", "weight"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.int8)),
        (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int8)),
        (torch.zeros(2, 3, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.uint8)),
        (torch.zeros(2, 3, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int8)),
    ],
)
def test_refuses_other_types_and_shapes(rows: torch.Tensor, weight: torch.Tensor) -> None:
    with pytest.raises(InvalidTensor, match="expected int32 rows"):
        ring.product(rows, weight)


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [(0, 0), (HIGHEST, HIGHEST), (2**31, LOWEST), (LOWEST, LOWEST), (LOWEST - 1, HIGHEST), (2**32, 0), (-(2**53), 0),
     (2**52 + 7, 7), (-(2**32) - 1, -1)],
)  # fmt: skip
def test_to_int32_reduces(wide: int, narrow: int) -> None:
    assert ring.to_int32(torch.tensor([wide])).tolist() == [narrow]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(1, 17, 5), (33, 64, 48), (2, 40_000, 3)])
def test_equals_big_integers_on_cuda(shape: tuple[int, int, int]) -> None:
    rows, weight = draw(*shape, seed=4)
    expected = reference(rows, weight)
    assert torch.equal(ring.product(rows.cuda(), weight.cuda()).cpu(), expected)
    assert torch.equal(ring.product(rows.cuda(), weight.t().contiguous().cuda().t()).cpu(), expected)


@pytest.mark.parametrize("num_rows", [5, 32, 33, 100])
def test_many_rows_go_in_blocks(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    monkeypatch.setattr(ring, "_SCRATCH_BYTES", 1)  # so that a block has the least number of rows
    rows = torch.randint(-(2**31), 2**31, (num_rows, 40), dtype=torch.int32)
    weight = torch.randint(-127, 128, (40, 24), dtype=torch.int8)
    first = ring.product(rows, weight)
    assert torch.equal(first, reference(rows, weight))
    ring.product(rows + 1, weight)  # scratch memory is used again; what was given away stays
    assert torch.equal(first, reference(rows, weight))


def test_a_product_made_in_inference_mode_leaves_later_ones_alone() -> None:
    rows = torch.randint(-(2**31), 2**31, (9, 4099), dtype=torch.int32)
    weight = torch.randint(-127, 128, (4099, 3), dtype=torch.int8)  # wider than any other here: fresh scratch memory
    expected = reference(rows, weight)
    with torch.inference_mode():
        assert torch.equal(ring.product(rows, weight), expected)
    assert torch.equal(ring.product(rows, weight), expected)


@pytest.mark.parametrize("sizes", [(1,), (1, 2), (1, 1, 1, 1), (2, 0, 3), (0, 0), (1, 300, 7), (64, 64), (700, 1, 5)])
@pytest.mark.parametrize(("d", "m"), [(24, 40), (1, 8), (1536, 16)])
def test_several_at_once_are_each_ones_product(sizes: tuple[int, ...], d: int, m: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(ring, "_SCRATCH_BYTES", 1 << 16)  # blocks that end within a matrix
    weight = torch.randint(-127, 128, (d, m), dtype=torch.int8)
    parts = [torch.randint(-(2**31), 2**31, (rows, d), dtype=torch.int32) for rows in sizes]
    replies = ring.products(parts, weight)
    for rows, reply in zip(parts, replies, strict=True):
        assert torch.equal(reply, ring._product_by_float64(rows, weight))
        assert reply.untyped_storage().nbytes() == reply.numel() * 4  # its own
    with pytest.raises(InvalidTensor):
        ring.products([*parts, torch.zeros(1, d + 1, dtype=torch.int32)], weight)
