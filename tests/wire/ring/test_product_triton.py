"""Tests the Triton kernels against int64 products, in Triton's interpreter on the CPU, and on a GPU if there is one."""

from __future__ import annotations

import functools
import itertools
import logging
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.cuda import multiplied_on_cuda, needs_cuda
from tests.support.ring_products import EXTREMES, LAYOUTS, draw, laid_out
from tests.support.triton_kernels import FEW_ROWS, STACKED_ROWS, interpret, lower_limits
from wire.ring import product as kernels
from wire.ring import product_triton
from wire.ring.product_triton import MOST_FEW_ROWS, MOST_INNER, MOST_STACKED_ROWS, Form, passes_self_test

CPU = torch.device("cpu")
FORMS: tuple[Form, ...] = ("described", "horner", "planes", "digits")
FEW: Form = "planes"
"""Any form: up to MOST_STACKED_ROWS rows are multiplied by one kernel for all."""


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)


@pytest.fixture
def _low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    lower_limits(monkeypatch)


@pytest.fixture
def _fresh_self_test() -> Iterator[None]:
    for kept in (product_triton.is_exact, product_triton.exact_form):
        kept.cache_clear()
    yield
    for kept in (product_triton.is_exact, product_triton.exact_form):
        kept.cache_clear()


def exact(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (rows.to(torch.int64) @ weight.to(torch.int64)).to(torch.int32)  # The conversion keeps the low half.


def with_lowest(rows: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds weights of -128, which the quantiser does not make."""
    weight[::5] = -128
    return rows, weight


def assert_same(found: torch.Tensor, expected: torch.Tensor, bits: int) -> None:
    """Checks the low `bits` bits of each number. A caller that asks for 24 bits must drop the others."""
    assert (found.shape, found.dtype) == (expected.shape, torch.int32)
    assert torch.equal(found << (32 - bits), expected << (32 - bits))


# ---- in the interpreter ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("interpreted", "_low_limits")
@pytest.mark.parametrize("bits", [32, 24])
@pytest.mark.parametrize(
    ("shape", "form"),
    [
        *((shape, FEW) for shape in [(1, 1, 1), (2, 17, 5), (3, 129, 65), (4, 256, 64), (5, 9, 8), (8, 128, 64)]),
        ((3, 1100, 7), FEW),
        *itertools.product([(9, 130, 67), (9, 144, 96), (17, 40, 24)], FORMS),
    ],
)
def test_equals_int64_on_odd_shapes(shape: tuple[int, int, int], form: Form, bits: int) -> None:
    rows, weight = with_lowest(*draw(*shape, seed=sum(shape)))
    before = rows.clone(), weight.clone()
    for layout in ("contiguous", "transposed"):
        assert_same(product_triton.product(rows, laid_out(weight, layout), bits, form), exact(rows, weight), bits)
    assert torch.equal(rows, before[0])
    assert torch.equal(weight, before[1])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("num_rows", [MOST_FEW_ROWS, MOST_FEW_ROWS + 1, MOST_STACKED_ROWS, MOST_STACKED_ROWS + 1])
def test_equals_int64_on_both_sides_of_the_real_limits(num_rows: int) -> None:
    rows, weight = with_lowest(*draw(num_rows, 17, 5, seed=num_rows))
    assert_same(product_triton.product(rows, weight, form=FEW), exact(rows, weight), 32)


@pytest.mark.usefixtures("interpreted", "_low_limits")
@given(
    num_rows=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 17]),
    d=st.integers(1, 140),
    m=st.integers(1, 70),
    seed=st.integers(0, 2**32),
    row_layout=st.sampled_from(LAYOUTS),
    weight_layout=st.sampled_from(LAYOUTS),
    form=st.sampled_from(FORMS),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equals_int64(
    num_rows: int, d: int, m: int, seed: int, row_layout: str, weight_layout: str, form: Form
) -> None:
    rows, weight = with_lowest(*draw(num_rows, d, m, seed))
    found = product_triton.product(laid_out(rows, row_layout), laid_out(weight, weight_layout), form=form)
    assert_same(found, exact(rows, weight), 32)


@pytest.mark.usefixtures("interpreted", "_low_limits")
@pytest.mark.parametrize(
    ("num_rows", "form"),
    [(FEW_ROWS, FEW), (FEW_ROWS + 1, FEW), *((STACKED_ROWS + 1, form) for form in FORMS)],
)
def test_extremes(num_rows: int, form: Form) -> None:
    weight = torch.empty(300, 4, dtype=torch.int8)
    weight[:, 0], weight[:, 1], weight[:, 2], weight[:, 3] = -128, 127, 0, 127
    weight[::2, 3] = -128
    limits = [0x7F7F7F7F, 0x7F7F7F80, 0x00808080, 1023, 1024, -1024, -1025, 2047, 2048, (1 << 23) - 1, 1 << 23]
    values = torch.tensor([*EXTREMES.tolist(), *limits], dtype=torch.int32)
    num_products = -(-len(values) // num_rows)
    # A row holds one value only. Each value has a row, and after the last value the first one comes again.
    all_rows = values[torch.arange(num_products * num_rows) % len(values), None].repeat(1, 300)
    for rows in all_rows.split(num_rows):
        for bits in (32, 24):
            assert_same(product_triton.product(rows, weight, bits, form), exact(rows, weight), bits)


@pytest.mark.usefixtures("interpreted", "_low_limits")
@pytest.mark.parametrize(
    ("num_rows", "form"),
    [(2, FEW), (FEW_ROWS + 1, FEW), *((STACKED_ROWS + 1, form) for form in FORMS)],
)
def test_an_inner_width_past_the_largest_is_multiplied_in_pieces(
    num_rows: int, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_triton, "MOST_INNER", 128)
    rows, weight = draw(num_rows, 300, 9, seed=1)
    assert_same(product_triton.product(rows, weight, form=form), exact(rows, weight), 32)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing_to_multiply(shape: tuple[int, int, int]) -> None:
    num_rows, d, m = shape
    found = product_triton.product(torch.ones(num_rows, d, dtype=torch.int32), torch.ones(d, m, dtype=torch.int8))
    assert torch.equal(found, torch.zeros(num_rows, m, dtype=torch.int32))


def test_no_planes_sum_leaves_int32() -> None:
    assert 128 * 128 * MOST_INNER < 2**31
    assert MOST_INNER % 16 == 0


# ---- the self-test --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted", "_fresh_self_test")
def test_the_self_test_accepts_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of the inner width are made large, since the interpreter is slow for each block."""
    blocks = {"BLOCK_M": 32, "BLOCK_N": 16, "BLOCK_K": 1 << 12}
    monkeypatch.setitem(product_triton.BLOCKS, "planes", {**product_triton.BLOCKS["planes"], **blocks})
    few = {"BLOCK_N": 16, "BLOCK_K": 1 << 12}
    for name in ("FEW_BLOCKS", "STACKED_BLOCKS"):
        monkeypatch.setattr(product_triton, name, {**getattr(product_triton, name), **few})
    assert product_triton.is_exact(CPU)


def by_limbs(rows: torch.Tensor, weight: torch.Tensor, per_plane: bool, saturates: bool) -> torch.Tensor:
    """Multiplies planes of limbs by Horner's rule as a chip does, in blocks of the inner width. Sums saturate or
    wrap. A block's sum is below 2^26, so float64 has it exactly, and it is multiplied in a tenth of int64's time."""
    turned = (rows + 0x00808080) ^ 0x00808080
    total = torch.zeros(rows.shape[0], weight.shape[1], dtype=torch.int64)
    weight = weight.to(torch.float64)
    for plane in (3, 2, 1, 0):
        limbs = (turned >> (8 * plane)).to(torch.int8).to(torch.float64)
        total = kernels.to_int32(total << 8).to(torch.int64)
        part = torch.zeros_like(total) if per_plane else total
        for start in range(0, rows.shape[1], 4096):
            part = part + (limbs[:, start : start + 4096] @ weight[start : start + 4096]).to(torch.int64)
            part = part.clamp(-(2**31), 2**31 - 1) if saturates else kernels.to_int32(part).to(torch.int64)
        total = kernels.to_int32(total + part if per_plane else part).to(torch.int64)
    return total.to(torch.int32)


@pytest.mark.parametrize(
    ("per_plane", "saturates", "passes"),
    [(False, False, True), (False, True, False), (True, True, True)],
)
def test_the_self_test_refuses_a_sum_that_saturates(per_plane: bool, saturates: bool, passes: bool) -> None:
    """One sum for all planes is exact if it wraps; a sum per plane is exact even if it saturates."""
    multiply = functools.partial(by_limbs, per_plane=per_plane, saturates=saturates)
    assert passes_self_test(multiply, CPU) is passes


def test_saturation_shows_in_the_largest_number_against_one_and_minus_one() -> None:
    rows, weight = product_triton.extreme_operands(3)
    assert rows[0].unique().tolist() == [2**31 - 1]
    assert weight[:, :2].unique(dim=0).tolist() == [[1, -1]]
    found = by_limbs(rows[:1], weight[:, :2], per_plane=False, saturates=True)
    assert not torch.equal(found, exact(rows[:1], weight[:, :2]))


def test_the_self_test_refuses_a_wrong_digit() -> None:
    def wrong(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        reply = exact(rows, weight)
        reply[-1, -1] += 1
        return reply

    assert not passes_self_test(wrong, CPU)


@pytest.mark.usefixtures("_fresh_self_test")
@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ImportError("no triton"), None),
        (RuntimeError("Failed to find C compiler. Please specify via CC"), "Triton finds no C compiler; install gcc"),
        (ValueError("secret numbers"), "cuBLAS' are: ValueError"),
    ],
)
def test_without_a_kernel_the_fallback_is_used_and_one_line_says_why(
    error: Exception, line: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(product_triton, "kernels", fail)
    with caplog.at_level(logging.INFO):
        assert not product_triton.is_exact(CPU)
    assert len(caplog.messages) == (line is not None)
    assert all(line and line in said and "secret" not in said for said in caplog.messages)


@pytest.mark.parametrize(
    ("capability", "form"),
    [((8, 0), "planes"), ((8, 9), "planes"), ((9, 0), "described"), ((10, 0), "planes"), ((10, 3), "digits"),
     ((12, 0), "planes"), ((99, 0), "planes")],
)  # fmt: skip
def test_the_form_suits_the_chip(capability: tuple[int, int], form: Form) -> None:
    assert product_triton.form_of(capability) == form


@pytest.mark.usefixtures("_fresh_self_test")
@pytest.mark.parametrize(
    ("failing", "chosen"), [((), "described"), (("described",), "planes"), (("described", "planes"), None)]
)
def test_a_form_that_fails_its_self_test_is_replaced_by_the_safest(
    failing: tuple[Form, ...], chosen: Form | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        product_triton, "passes_self_test", lambda multiply, device: multiply.keywords["form"] not in failing
    )
    gpu = torch.device("cuda", 0)
    assert product_triton.exact_form(gpu) == chosen
    assert product_triton.is_exact(gpu) is (chosen is not None)


@pytest.mark.usefixtures("_fresh_self_test")
@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_all_block_sizes_of_a_form_pass_the_self_test(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The self-test's own products are too small for the large blocks to be chosen."""
    tested: list[dict[str, int]] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(
        product_triton, "passes_self_test", lambda multiply, device: not tested.append(multiply.keywords["blocks"])
    )
    form = product_triton.exact_form(torch.device("cuda", 0))
    assert form is not None
    small = product_triton.SMALL_BLOCKS.get(form)
    assert tested == [product_triton.BLOCKS[form], *([small] if small else [])]


@pytest.mark.parametrize(
    ("num_rows", "m", "is_small"),
    [(4096, 4096, False), (512, 12_288, True), (512, 4096, True), (512, 22_016, False), (128, 4096, True),
     (128, 22_016, False), (70, 24, True)],
)  # fmt: skip
def test_blocks_keep_all_units_of_a_chip_busy(
    num_rows: int, m: int, is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the 132 units of an H100, each choice is the faster one of docs/accelerators.md's measurements."""
    monkeypatch.setattr(product_triton, "num_units", lambda device: 132)
    chosen = product_triton.blocks_of("described", num_rows, m, CPU)
    assert chosen is (product_triton.SMALL_BLOCKS if is_small else product_triton.BLOCKS)["described"]
    assert product_triton.blocks_of("planes", num_rows, m, CPU) is product_triton.BLOCKS["planes"]


@pytest.mark.usefixtures("interpreted", "_low_limits")
def test_a_weight_that_the_copy_engine_cannot_read_is_read_otherwise() -> None:
    """Its rows are no whole 16 bytes, or it begins between two of them."""
    rows, _ = draw(STACKED_ROWS + 1, 24, 8, seed=1)
    for width, start in ((24, 0), (32, 8)):
        weight = torch.zeros(8 * width + 16, dtype=torch.int8)[start : start + 8 * width].view(8, width)[:, :24].t()
        weight.copy_(draw(1, 24, 8, seed=2)[1])
        assert torch.equal(product_triton.product(rows, weight, 32, "described"), exact(rows, weight))


@pytest.mark.usefixtures("interpreted")
def test_products_of_a_device_go_through_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_triton, "is_exact", lambda device: True)
    monkeypatch.setattr(product_triton, "exact_form", lambda device: "planes")
    rows, weight = draw(40, 30, 9, seed=3)
    first, second = kernels.KERNELS["CUDA"]([rows[:2], rows[2:]], weight)
    assert torch.equal(torch.cat([first, second]), exact(rows, weight))


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def process() -> Iterator[ProcessPoolExecutor]:
    """Starts a process in which no kernel was interpreted, since the interpreter changes Triton for its process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("bits", [32, 24])
@pytest.mark.parametrize("shape", [(1, 17, 5), (5, 64, 48), (33, 100, 30), (2, 140_000, 3), (300, 2048, 264)])
def test_equals_int64_on_cuda(process: ProcessPoolExecutor, shape: tuple[int, int, int], bits: int) -> None:
    rows, weight = with_lowest(*draw(*shape, seed=sum(shape)))
    for layout in ("contiguous", "transposed"):
        found = process.submit(multiplied_on_cuda, rows, laid_out(weight, layout), bits).result()
        assert_same(found, exact(rows, weight), bits)


@pytest.mark.gpu
@needs_cuda
def test_the_self_test_passes_on_cuda(process: ProcessPoolExecutor) -> None:
    assert process.submit(product_triton.is_exact, torch.device("cuda", 0)).result()
