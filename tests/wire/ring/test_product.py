"""Tests the product mod 2^32: every kernel gives the results of big integers for every shape, layout and value."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.compiled_kernels import needs_products
from tests.support.cuda import gone, missing, saturating
from tests.support.repository import golden_vectors
from tests.support.ring_products import HIGHEST, LAYOUTS, LOWEST, Product, draw, laid_out, reference
from tests.support.waiting import WAIT_S, end
from wire.errors import InvalidTensor
from wire.ring import coding, product_cuda
from wire.ring import kernels as compiled
from wire.ring import product as kernels

needs_int_mm = pytest.mark.skipif(not kernels.int_mm_is_exact(), reason="this machine's _int_mm is not exact")


def by(name: str) -> Product:
    """Returns the kernel of this name as a function of one matrix."""

    def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return kernels.KERNELS[name]([rows], weight)[0]

    return product


by_float64, by_compiled = by("float64"), by("compiled")


def by_avx2(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with mock.patch.object(compiled, "has_vnni", return_value=False):
        return by_compiled(rows, weight)


LIMBS = [by("limbs, few rows"), by("limbs")]
ANYWHERE = [by("plain"), by("int32"), by_float64]
KERNELS = [
    coding.product,
    *ANYWHERE,
    pytest.param(by_compiled, marks=needs_products),
    pytest.param(by_avx2, marks=needs_products),
    *(pytest.param(kernel, marks=needs_int_mm) for kernel in LIMBS),
]


@pytest.fixture(
    params=[
        pytest.param("limbs", marks=needs_int_mm),
        pytest.param("compiled", marks=needs_products),
        "neither",
    ]
)
def is_fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Makes the tests run with `_int_mm` counted as fast, without it but with compiled kernels, and without both, if
    the machine has them."""
    monkeypatch.setattr(kernels, "int_mm_is_fast", lambda: request.param == "limbs")
    monkeypatch.setattr(compiled, "available", lambda: request.param == "compiled")
    return bool(request.param == "limbs")


def in_new_thread(work: Callable[[], bool]) -> bool:
    """Returns the result of a call in a new thread, which has no scratch memory yet."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    end(thread)
    return found == [True]


@given(
    num_rows=st.integers(0, 6),
    d=st.integers(1, 70),
    m=st.integers(1, 40),
    seed=st.integers(0, 2**32),
    row_layout=st.sampled_from(LAYOUTS),
    weight_layout=st.sampled_from(LAYOUTS),
)
@settings(max_examples=250, deadline=None)
def test_equals_big_integers(num_rows: int, d: int, m: int, seed: int, row_layout: str, weight_layout: str) -> None:
    rows, weight = draw(num_rows, d, m, seed)
    expected = reference(rows, weight)
    rows, weight = laid_out(rows, row_layout), laid_out(weight, weight_layout)
    before = rows.clone()
    assert torch.equal(coding.product(rows, weight), expected)
    for kernel in ANYWHERE:
        assert torch.equal(kernel(rows, weight), expected)
    if num_rows and d > 1 and m > 1 and kernels.int_mm_is_exact():  # the shapes for which `product` takes it
        for kernel in LIMBS:
            assert torch.equal(kernel(rows, weight), expected)
    if compiled.available() and compiled.suits(weight):
        assert torch.equal(by_compiled(rows, weight), expected)
    assert torch.equal(rows, before)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", golden_vectors("ring.json"), ids=lambda case: case["name"])
def test_golden(case: dict[str, Any], kernel: Product) -> None:
    rows = torch.tensor(case["rows"], dtype=torch.int32)
    weight = torch.tensor(case["weight"], dtype=torch.int8)
    if kernel in LIMBS and min(weight.shape) == 1:
        pytest.skip("`product` does not give it size-1 dimensions")
    assert kernel(rows, weight).tolist() == case["product"]
    assert kernel(rows, weight.t().contiguous().t()).tolist() == case["product"]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("value", [LOWEST, HIGHEST, -1])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_extremes_beyond_one_float64_block(kernel: Product, value: int, num_rows: int) -> None:
    # 2^31 · 127 · 70,000 is past 2^53, and 255 · 127 · 70,000 past 2^31: all kernels must have split or wrapped.
    d = 70_000
    rows = torch.full((num_rows, d), value, dtype=torch.int32)
    weight = torch.full((d, 3), 127, dtype=torch.int8)
    weight[:, 1] = -127
    weight[::2, 2] = -127
    expected = [(value * total + 2**31) % 2**32 - 2**31 for total in (127 * d, -127 * d, 0)]
    assert kernel(rows, weight).tolist() == [expected] * num_rows


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("d", [size + more for size in (2**11, 2**13, 2**15) for more in (-1, 0, 1)])
def test_around_the_float64_splits(kernel: Product, d: int) -> None:
    rows, weight = draw(2, d, 3, seed=d)
    assert torch.equal(kernel(rows, weight), reference(rows, weight))


def test_adding_masks_and_taking_them_off_is_exact() -> None:
    rows, weight = draw(4, 50, 9, seed=1)
    noise, _ = draw(4, 50, 9, seed=2)
    difference = coding.product(rows + noise, weight) - coding.product(noise, weight)
    assert torch.equal(difference, coding.product(rows, weight))


def test_masked_rows_leave_the_callers_rows_alone() -> None:
    rows, weight = draw(3, 8, 8, seed=5)
    kept = rows.clone()
    rows.requires_grad_(False)
    coding.product(rows, weight).zero_()
    assert torch.equal(rows, kept)


@pytest.fixture
def _fresh_self_test() -> Iterator[None]:
    for test in (kernels.int_mm_is_exact, kernels.int_mm_is_fast):
        test.cache_clear()
    yield
    for test in (kernels.int_mm_is_exact, kernels.int_mm_is_fast):
        test.cache_clear()


@pytest.mark.usefixtures("_fresh_self_test")
@pytest.mark.parametrize("kernel", [saturating, missing])
def test_falls_back_where_the_private_kernel_is_wrong(kernel: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_cuda, "multiply", kernel)
    monkeypatch.setattr(compiled, "available", lambda: False)
    assert not kernels.int_mm_is_exact()
    assert not kernels.int_mm_is_fast()
    rows, weight = draw(3, 20, 6, seed=3)
    assert torch.equal(coding.product(rows, weight), reference(rows, weight))


@pytest.mark.usefixtures("_fresh_self_test")
def test_falls_back_where_the_private_kernel_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_cuda, "multiply", gone)
    assert not kernels.int_mm_is_exact()


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
        coding.product(rows, weight)


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [(0, 0), (HIGHEST, HIGHEST), (2**31, LOWEST), (LOWEST, LOWEST), (LOWEST - 1, HIGHEST), (2**32, 0), (-(2**53), 0),
     (2**52 + 7, 7), (-(2**32) - 1, -1)],
)  # fmt: skip
def test_to_int32_reduces(wide: int, narrow: int) -> None:
    assert coding.to_int32(torch.tensor([wide])).tolist() == [narrow]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", [(1, 17, 5), (33, 64, 48), (2, 40_000, 3)])
def test_equals_big_integers_on_cuda(shape: tuple[int, int, int]) -> None:
    rows, weight = draw(*shape, seed=4)
    expected = reference(rows, weight)
    assert torch.equal(coding.product(rows.cuda(), weight.cuda()).cpu(), expected)
    assert torch.equal(coding.product(rows.cuda(), weight.t().contiguous().cuda().t()).cpu(), expected)


@pytest.mark.usefixtures("is_fast")
@pytest.mark.parametrize("num_rows", [1, 5, 32, 33, 100])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_many_rows_go_in_blocks(monkeypatch: pytest.MonkeyPatch, num_rows: int, layout: str) -> None:
    monkeypatch.setattr(kernels, "_SCRATCH_BYTES", 1)  # so that a block has the least number of rows and columns
    rows, weight = draw(num_rows, 40, 75, seed=8)
    weight = laid_out(weight, layout)
    first = coding.product(rows, weight)
    assert torch.equal(first, reference(rows, weight))
    coding.product(rows + 1, weight)  # scratch memory is used again; what was given away stays
    assert torch.equal(first, reference(rows, weight))


@pytest.mark.usefixtures("is_fast")
@pytest.mark.parametrize("num_rows", [1, 60])
def test_a_product_made_in_inference_mode_leaves_later_ones_alone(num_rows: int) -> None:
    rows, weight = draw(num_rows, 99, 5, seed=9)
    expected = reference(rows, weight)

    def both() -> bool:
        with torch.inference_mode():
            first = coding.product(rows, weight)
        return torch.equal(first, expected) and torch.equal(coding.product(rows, weight), expected)

    assert in_new_thread(both)


@pytest.mark.usefixtures("is_fast")
def test_threads_do_not_share_scratch_memory() -> None:
    cases = [draw(num_rows, 64 + num_rows, 48, seed=num_rows) for num_rows in (1, 3, 40, 200)]
    expected = [kernels.plain_product(*case) for case in cases]
    begin = threading.Barrier(len(cases), timeout=WAIT_S)
    right: list[bool] = []

    def run(index: int) -> None:
        begin.wait()
        right.extend(torch.equal(coding.product(*cases[index]), expected[index]) for _ in range(50))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    end(threads)
    assert right == [True] * 50 * len(cases)


@pytest.mark.parametrize("value", [-127, 127, -128])
@pytest.mark.parametrize("d", [2**13, 2**14])
@pytest.mark.parametrize("row", [LOWEST, HIGHEST])
def test_sums_at_the_rounders_bound(value: int, d: int, row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The float64 product is exact up to its limit: 8,192 products of 2^31 and 128 have the sum 2^51, beyond which
    float64 numbers are no longer spaced finely enough."""
    monkeypatch.setattr(kernels, "_FAST_INNER_ROWS", 2**20)
    rows = torch.full((40, d), row, dtype=torch.int32)
    weight = torch.full((d, 33), value, dtype=torch.int8)
    rows[1, -1], weight[-1, 1] = 1, 1  # sums that are no multiples of anything
    expected = kernels.plain_product(rows, weight)
    assert torch.equal(expected[:2, :2], reference(rows[:2], weight[:, :2]))
    assert torch.equal(by_float64(rows, weight), expected)


def test_nothing_times_nothing_is_zero() -> None:
    for kernel in ANYWHERE:
        assert (
            kernel(torch.empty(3, 0, dtype=torch.int32), torch.empty(0, 2, dtype=torch.int8)).tolist() == [[0, 0]] * 3
        )
        assert kernel(torch.ones(3, 2, dtype=torch.int32), torch.empty(2, 0, dtype=torch.int8)).shape == (3, 0)


@pytest.mark.parametrize(
    ("is_fast", "num_threads", "num_rows", "m", "chosen"),
    [
        ("compiled", 1, 1, 8, "compiled"),
        ("compiled", 2, 512, 1, "compiled"),
        ("compiled and int_mm", 2, 5, 8, "limbs"),
        ("vnni and int_mm", 2, 5, 8, "compiled"),
        ("vnni and int_mm", 1, 1, 8, "compiled"),
        (True, 1, 1, 8, "limbs, few rows"),
        (True, 2, 4, 8, "limbs, few rows"),
        (True, 2, 5, 8, "limbs"),
        (True, 1, 1, 1, "int32"),
        (False, 1, 24, 8, "int32"),
        (False, 1, 25, 8, "float64"),
        (False, 2, 16, 8, "int32"),
        (False, 2, 17, 8, "float64"),
        (False, 64, 1, 8, "float64"),
        (False, 1, 512, 1, "float64"),
    ],
)
def test_the_choice(
    is_fast: bool | str, num_threads: int, num_rows: int, m: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "int_mm_is_fast", lambda: is_fast is True or "int_mm" in str(is_fast))
    monkeypatch.setattr(compiled, "available", lambda: isinstance(is_fast, str))
    monkeypatch.setattr(compiled, "has_vnni", lambda: str(is_fast).startswith("vnni"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    weight = torch.zeros(8, m, dtype=torch.int8)
    assert kernels.choose(num_rows, weight) == chosen
    assert kernels.choose(num_rows, weight.to("meta")) == "plain"
    used: list[int] = []
    monkeypatch.setitem(kernels.KERNELS, chosen, lambda parts, _: [used.append(len(parts))])
    coding.product(torch.zeros(num_rows, 8, dtype=torch.int32), weight)
    coding.products([torch.zeros(1, 8, dtype=torch.int32)] * num_rows, weight)
    assert used == [1, num_rows]


@needs_int_mm
@pytest.mark.usefixtures("_fresh_self_test")
@pytest.mark.parametrize(("int_mm_s", "is_fast"), [(0.001, False), (0.0001, True)])
def test_fast_is_what_keeps_up_with_the_plain_loop(
    int_mm_s: float, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]

    def taking(work: Callable[..., torch.Tensor], cost_s: float) -> Callable[..., torch.Tensor]:
        def run(*given: torch.Tensor) -> torch.Tensor:
            assert threading.current_thread() is not threading.main_thread(), "measured with the caller's threads"
            now_s[0] += cost_s
            return work(*given)

        return run

    assert kernels.int_mm_is_exact()
    monkeypatch.setattr(kernels, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    monkeypatch.setattr(product_cuda, "multiply", taking(product_cuda.multiply, int_mm_s))
    monkeypatch.setattr(torch, "mm", taking(torch.mm, 0.0001))
    assert kernels.int_mm_is_fast() is is_fast


@pytest.mark.slow
def test_importing_measures_nothing() -> None:
    code = "from wire.ring import product; print(product.int_mm_is_fast.cache_info().currsize)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"0\n"


@pytest.mark.usefixtures("is_fast")
@pytest.mark.parametrize("sizes", [(1,), (1, 2), (1, 1, 1, 1), (2, 0, 3), (0, 0), (1, 300, 7), (64, 64), (700, 1, 5)])
@pytest.mark.parametrize(("d", "m"), [(24, 40), (1, 8), (1536, 16)])
def test_several_at_once_are_each_ones_product(sizes: tuple[int, ...], d: int, m: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(kernels, "_SCRATCH_BYTES", 1 << 16)  # blocks that end within a matrix
    weight = torch.randint(-127, 128, (d, m), dtype=torch.int8)
    parts = [torch.randint(-(2**31), 2**31, (rows, d), dtype=torch.int32) for rows in sizes]
    replies = coding.products(parts, weight)
    for rows, reply in zip(parts, replies, strict=True):
        assert torch.equal(reply, kernels.plain_product(rows, weight))
        assert reply.untyped_storage().nbytes() == reply.numel() * 4  # its own
    with pytest.raises(InvalidTensor):
        coding.products([*parts, torch.zeros(1, d + 1, dtype=torch.int32)], weight)
