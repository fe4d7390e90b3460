"""Tests the product by signed limbs, as a GPU computes it. It runs here on the CPU, against big integers, and on a GPU
if there is one."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cuda import gone, missing, needs_cuda, saturating
from tests.support.ring_products import EXTREMES, HIGHEST, LAYOUTS, LOWEST, Product, draw, laid_out, reference
from wire.ring import coding, product_cuda, product_triton
from wire.ring import product as kernels

CPU = torch.device("cpu")
is_trustworthy = kernels.int_mm_is_exact() and product_cuda.is_exact(CPU)
needs_int_mm = pytest.mark.skipif(not is_trustworthy, reason="this machine's _int_mm is not exact")
SHAPES = [(1, 1, 1), (1, 17, 5), (5, 64, 48), (16, 8, 9), (17, 9, 8), (33, 100, 30)]


@pytest.fixture
def _fresh_self_test() -> Iterator[None]:
    product_cuda.is_exact.cache_clear()
    yield
    product_cuda.is_exact.cache_clear()


Operands = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[Operands]:
    """Returns a list of the operands of the device's byte multiplication from now on. In these tests the multiplication
    is computed in int64."""
    seen: list[Operands] = []

    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        seen.append((left, right))
        return (left.to(torch.int64) @ right.to(torch.int64)).to(torch.int32)

    monkeypatch.setattr(product_cuda, "multiply", multiply)
    return seen


def full_range(num_rows: int, d: int, m: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows and a weight as `draw` does, plus weights of -128, which the quantiser does not make."""
    rows, weight = draw(num_rows, d, m, seed)
    generator = torch.Generator().manual_seed(seed)
    return rows, torch.where(torch.rand(d, m, generator=generator) < 0.2, -128, weight.to(torch.int32)).to(torch.int8)


# ---- on the CPU -----------------------------------------------------------------------------------------------------


@needs_int_mm
@given(
    num_rows=st.integers(0, 20),
    d=st.integers(1, 70),
    m=st.integers(1, 40),
    seed=st.integers(0, 2**32),
    row_layout=st.sampled_from(LAYOUTS),
    weight_layout=st.sampled_from(LAYOUTS),
)
@settings(max_examples=150, deadline=None)
def test_equals_big_integers(num_rows: int, d: int, m: int, seed: int, row_layout: str, weight_layout: str) -> None:
    rows, weight = full_range(num_rows, d, m, seed)
    expected = reference(rows, weight)
    rows, weight = laid_out(rows, row_layout), laid_out(weight, weight_layout)
    before = rows.clone(), weight.clone()
    for _ in range(2):  # the weight is prepared the first time
        found = product_cuda.product(rows, weight)
        assert torch.equal(found, expected)
        assert found.is_contiguous()
    assert torch.equal(rows, before[0])
    assert torch.equal(weight, before[1])


@needs_int_mm
@pytest.mark.parametrize("value", EXTREMES.tolist())
@pytest.mark.parametrize("num_rows", [1, 17])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_extremes(value: int, num_rows: int, layout: str) -> None:
    rows, weight = torch.full((num_rows, 1030), value, dtype=torch.int32), torch.empty(1030, 4, dtype=torch.int8)
    weight[:, 0], weight[:, 1], weight[:, 2], weight[:, 3] = -128, 127, 0, 127
    weight[::2, 3] = -128
    assert torch.equal(product_cuda.product(rows, laid_out(weight, layout)), reference(rows, weight))


@pytest.mark.parametrize("value", [*EXTREMES.tolist(), 0x7F7F7F7F, 0x7F7F7F80, 0x00808080, -0x7F7F7F80, -129, 127, 128])
def test_limbs_are_signed_bytes_that_stand_for_the_number(value: int, multiplied: list[Operands]) -> None:
    product_cuda.product(torch.full((2, 3), value, dtype=torch.int32), torch.ones(3, 5, dtype=torch.int8))
    ((left, right),) = multiplied
    assert (left.shape, left.dtype, left.is_contiguous()) == ((32, 8), torch.int8, True)
    assert right.shape == (8, 8)
    limbs = left.view(4, 8, 8)
    assert not limbs[:, 2:].any()
    assert not limbs[:, :, 3:].any()
    for number in limbs[:, :2, :3].reshape(4, -1).t().tolist():
        assert (sum(limb << (8 * place) for place, limb in enumerate(number)) - value) % 2**32 == 0


@needs_int_mm
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize(
    ("d", "pieces"), [((1 << 16) - 1, 1), (1 << 16, 1), ((1 << 16) + 1, 2), (1 << 17, 2), (200_000, 4)]
)
def test_pieces_of_the_inner_width(multiplied: list[Operands], layout: str, d: int, pieces: int) -> None:
    rows, weight = full_range(5, d, 11, seed=d)
    exact = (rows.to(torch.int64) @ weight.to(torch.int64)).to(torch.int32)  # The conversion keeps the low half.
    assert torch.equal(product_cuda.product(rows, laid_out(weight, layout)), exact)
    assert [left.shape[1] for left, _ in multiplied] == [min(d + -d % 8 - at, 1 << 16) for at in range(0, d, 1 << 16)]
    assert len(multiplied) == pieces


@needs_int_mm
@pytest.mark.parametrize("value", [LOWEST, HIGHEST, 0x7F7F7F80])
def test_wider_than_int32_sums_of_limbs(value: int) -> None:
    d = 140_000  # 128 · 128 · 140,000 is past 2^31
    rows, weight = torch.full((1, d), value, dtype=torch.int32), torch.full((d, 2), -128, dtype=torch.int8)
    weight[:, 1] = 127
    expected = [(value * total + 2**31) % 2**32 - 2**31 for total in (-128 * d, 127 * d)]
    assert product_cuda.product(rows, weight).tolist() == [expected]


@needs_int_mm
@pytest.mark.parametrize("num_rows", [1, 8, 9, 40])
def test_blocks_of_rows(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    monkeypatch.setattr(product_cuda, "_SCRATCH_BYTES", 1)
    rows, weight = full_range(num_rows, 30, 7, seed=num_rows)
    assert torch.equal(product_cuda.product(rows, weight), reference(rows, weight))


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing_to_multiply(shape: tuple[int, int, int]) -> None:
    num_rows, d, m = shape
    found = product_cuda.product(torch.ones(num_rows, d, dtype=torch.int32), torch.ones(d, m, dtype=torch.int8))
    assert torch.equal(found, torch.zeros(num_rows, m, dtype=torch.int32))


# ---- what is kept of a weight ---------------------------------------------------------------------------------------


def is_kept(address: int) -> bool:
    """Returns whether any tensor has its numbers in this memory."""
    gc.collect()
    return any(type(each) is torch.Tensor and each.data_ptr() == address for each in gc.get_objects())


def test_a_weight_is_prepared_once_and_forgotten_with_it(multiplied: list[Operands]) -> None:
    rows, weight = draw(1, 24, 16, seed=1)
    for _ in range(2):
        product_cuda.product(rows, weight)
    first, second = (right for _, right in multiplied)
    address = first.data_ptr()
    assert address == second.data_ptr() != weight.data_ptr()
    assert first.t().is_contiguous()
    assert torch.equal(first, weight)
    del first, second
    multiplied.clear()
    assert is_kept(address)
    del weight
    assert not is_kept(address)


def test_the_backward_weight_is_used_as_it_lies(multiplied: list[Operands]) -> None:
    rows, weight = draw(1, 24, 16, seed=1)
    product_cuda.product(rows[:, :16], weight.t())
    ((_, right),) = multiplied
    assert right.data_ptr() == weight.data_ptr()
    assert right.t().is_contiguous()


def test_a_slice_that_begins_between_is_copied(multiplied: list[Operands]) -> None:
    whole = torch.arange(8 + 24 * 16).to(torch.int8)
    weight = whole[8:].view(16, 24).t()
    assert weight.data_ptr() % 16 == 8, "the test's own premise"
    product_cuda.product(torch.ones(1, 24, dtype=torch.int32), weight)
    ((_, right),) = multiplied
    assert right.data_ptr() % 16 == 0
    assert torch.equal(right, weight)


@needs_int_mm
def test_a_changed_weight_is_prepared_again() -> None:
    rows, weight = draw(3, 24, 16, seed=1)
    product_cuda.product(rows, weight)
    weight.neg_()
    assert torch.equal(product_cuda.product(rows, weight), reference(rows, weight))


@needs_int_mm
def test_in_and_out_of_inference_mode() -> None:
    rows, weight = draw(3, 20, 13, seed=2)
    with torch.inference_mode():
        own = weight.clone()
        first = product_cuda.product(rows, weight), product_cuda.product(rows, own)
    assert torch.equal(first[0], reference(rows, weight))
    assert torch.equal(first[1], first[0])
    assert torch.equal(product_cuda.product(rows, weight), first[0])
    assert torch.equal(product_cuda.product(rows, own), first[0])


# ---- the self-test --------------------------------------------------------------------------------------------------


@needs_int_mm
@pytest.mark.usefixtures("_fresh_self_test")
def test_the_self_test_accepts_what_is_exact() -> None:
    assert product_cuda.is_exact(CPU)


@pytest.mark.usefixtures("_fresh_self_test")
@pytest.mark.parametrize("kernel", [saturating, missing])
def test_the_self_test_refuses_what_is_not(kernel: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_cuda, "multiply", kernel)
    assert not product_cuda.is_exact(CPU)


@pytest.mark.usefixtures("_fresh_self_test")
def test_the_self_test_refuses_what_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_cuda, "multiply", gone)
    assert not product_cuda.is_exact(CPU)


@pytest.mark.parametrize("is_exact", [pytest.param(True, marks=needs_int_mm), False])
def test_falls_back_to_the_plain_form(is_exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_triton, "is_exact", lambda device: False)
    monkeypatch.setattr(product_cuda, "is_exact", lambda device: is_exact)
    used: list[int] = []
    by_limbs = product_cuda.product
    monkeypatch.setattr(product_cuda, "product", lambda *given: used.append(1) or by_limbs(*given))
    rows, weight = draw(5, 30, 9, seed=3)
    first, second = kernels.KERNELS["CUDA"]([rows[:2], rows[2:]], weight)
    assert torch.equal(torch.cat([first, second]), reference(rows, weight))
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr(), "memory of their own"
    assert bool(used) is is_exact


def test_only_cuda_weights_go_this_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.KERNELS, "CUDA", lambda *given: pytest.fail("this weight is on the CPU"))
    rows, weight = draw(5, 30, 9, seed=3)
    assert torch.equal(coding.product(rows, weight), reference(rows, weight))
    assert kernels.choose(1, torch.empty(3, 3, dtype=torch.int8, device="meta")) == "plain"


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 140_000, 3), (300, 2048, 264)])
def test_equals_big_integers_on_cuda(shape: tuple[int, int, int], layout: str) -> None:
    rows, weight = full_range(*shape, seed=sum(shape))
    expected = (rows.to(torch.int64) @ weight.to(torch.int64)).to(torch.int32)
    there = laid_out(weight, layout).cuda()
    assert there.stride() == laid_out(weight, layout).stride(), "the test's own premise"
    assert torch.equal(product_cuda.product(rows.cuda(), there).cpu(), expected)
    assert torch.equal(coding.product(rows.cuda(), there).cpu(), expected)
    parts = coding.products([rows[:1].cuda(), rows[1:].cuda()], there)
    assert torch.equal(torch.cat(parts).cpu(), expected)


@pytest.mark.gpu
@needs_cuda
def test_the_self_test_passes_on_cuda() -> None:
    assert product_cuda.is_exact(torch.empty(0, device="cuda").device)
