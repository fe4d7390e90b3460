"""This module multiplies int32 rows by int8 weights mod 2^32 on an NVIDIA GPU, with kernels that are written in Triton
(the extra `veilbase[gpu]`).

Guarantees: the product is exact mod 2^32 for all numbers, shapes and memory orders, on devices for which `is_exact` is
True. For other devices, and without Triton, wire/ring/product.py uses wire/ring/product_cuda.py. Many rows are split
into planes of digits in a first pass; a second pass multiplies the planes and joins them by shifts, without a sum in
memory between. A few rows are split where they are multiplied.

The kernels are tested without a GPU in Triton's interpreter, and compiled for the chips that `form_of` distinguishes.
Block sizes were chosen by time on an H100 (benchmarks/accelerator/sweep.py); on other chips they were not timed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch

from wire.ring.product_cuda import prepared

Form = Literal["described", "horner", "planes", "digits"]
"""How planes are multiplied: `horner` in one int32 sum that wraps, `described` the same by tensor descriptors, which
the chip's copy engine reads, `planes` in an int32 sum for each plane, `digits` in float16."""
WRAPPING = ((9, 0),)
"""The compute capabilities for which every Triton from 3.6 on compiles an int8 product that wraps. For sm_100, 3.7.1
compiles one that saturates, and 3.9.0 one that wraps. tests/wire/ring/test_triton_compiled.py reads this
from the compiled code."""
LITTLE_INT8 = ((10, 3),)
"""The compute capabilities of chips that have few int8 units, in favour of units for other types (Blackwell Ultra)."""
_SAFEST: Form = "planes"
MOST_FEW_ROWS = 16
"""The most rows that are multiplied by `multiply_few` as they are. It reads the weight once and splits it among
programs."""
MOST_STACKED_ROWS = 64
"""The most rows that are multiplied by `multiply_few` after a first pass has split them into planes."""
MOST_INNER = (1 << 17) - 16
"""The largest inner width of one product: 128 · 128 · MOST_INNER < 2^31, so that no plane's sum leaves int32. It is a
multiple of 16, so that each further slice begins at an aligned address."""
_ALIGNED = 16
_LOGGER = logging.getLogger(__name__)

_NO_FUSION = {"enable_fp_fusion": False}
"""A launch option. No sum here is rounded, so fused operations would change nothing; the option is set since Triton
warns if it is missing."""
BLOCKS: dict[Form, dict[str, int]] = {
    "described": {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 128, "num_warps": 8, "num_stages": 3, **_NO_FUSION},
    "horner": {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": 128, "num_warps": 8, "num_stages": 3, **_NO_FUSION},
    "planes": {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 8, "num_stages": 3, **_NO_FUSION},
    "digits": {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3, **_NO_FUSION},
}
"""The block sizes and launch options of each form. BLOCK_K of `digits` is at most 128 for digits of 11 bits and 64 for
12 bits. With 128 columns, `planes` spills registers on sm_80 under Triton 3.9.0, though not under 3.7.1."""
SMALL_BLOCKS: dict[Form, dict[str, int]] = {
    "described": {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4, **_NO_FUSION},
}
"""The block sizes for products that are too small for `BLOCKS`; see `blocks_of`."""
_SMALL_COST = 1.2
"""Measured on an H100 for 4096 × 4096 × 4096: 0.563 ms with small blocks, 0.471 ms with large ones."""
FEW_BLOCKS = {"BLOCK_N": 128, "BLOCK_K": 128, "SPLITS": 8, "num_warps": 4, "num_stages": 3, **_NO_FUSION}
"""The block sizes and launch options of `multiply_few` for up to `MOST_FEW_ROWS` rows."""
STACKED_BLOCKS = {"BLOCK_N": 64, "BLOCK_K": 128, "SPLITS": 2, "num_warps": 8, "num_stages": 3, **_NO_FUSION}
"""The same for up to `MOST_STACKED_ROWS` rows, which are split before."""
SPLIT_BLOCKS = {"BLOCK": 1024, "num_warps": 4, **_NO_FUSION}
"""The block size and launch options of `split_limbs` and `split_digits`."""


def kernels() -> Any:
    """Returns the module of the kernels.

    Raises:
        ImportError: Triton is not installed.
    """
    from wire.ring import triton_kernels

    return triton_kernels


def form_of(capability: tuple[int, int]) -> Form:
    """Returns the form that is exact and suits a chip of this compute capability. An unknown chip gets `planes`, which
    is exact whether its units wrap or saturate."""
    if capability in LITTLE_INT8:
        return "digits"
    return "described" if capability in WRAPPING else "planes"


@functools.cache
def exact_form(device: torch.device) -> Form | None:
    """Returns the form that is used on a device: the one that suits the chip, or `planes` if that one fails the
    self-test, as it may under another Triton. None if both fail. Raises ImportError if Triton is not installed, and any
    error of its compiler or of the driver."""
    suited = form_of(torch.cuda.get_device_capability(device)) if device.type == "cuda" else "planes"
    for form in dict.fromkeys((suited, _SAFEST)):
        # Products of the self-test are too small for `blocks_of` to choose the large blocks, so all are tried.
        tables = [table[form] for table in (BLOCKS, SMALL_BLOCKS) if form in table]
        if all(passes_self_test(functools.partial(product, form=form, blocks=each), device) for each in tables):
            return form
    return None


def product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bits: int = 32,
    form: Form | None = None,
    blocks: dict[str, int] | None = None,
) -> torch.Tensor:
    """Returns the matrix product rows · weight mod 2^bits, on a device for which `is_exact` is True.

    Args:
        rows: int32, shape (num_rows, d), any strides; with 24 bits, only the low 24 bits of each number count.
        weight: int8, shape (d, m), same device, any strides. A weight whose inner width is not contiguous is copied at
            its first use; see `product_cuda.prepared`.
        bits: 32; or 24, which takes three planes in place of four. No message of wire/SPEC.md has 24 bits yet, so no
            caller outside tests and benchmarks sets it.
        form: see `Form`; None takes that of `exact_form`, or `planes` if that is None.
        blocks: the block sizes and launch options for many rows; None for those that suit the shape.

    Returns:
        int32, shape (num_rows, m), contiguous. With 24 bits only the low 24 bits of each number are the product's.
    """
    num_rows, (d, m) = rows.shape[0], weight.shape
    # The kernel of few rows adds to the reply; that of many rows writes it.
    make = torch.zeros if num_rows <= MOST_STACKED_ROWS or d == 0 else torch.empty
    reply = make(num_rows, m, dtype=torch.int32, device=rows.device)
    if 0 in (num_rows, d, m):
        return reply
    chosen = form or exact_form(rows.device) or _SAFEST
    right = prepared(weight)
    with on(rows.device):
        for start in range(0, d, MOST_INNER):
            inner = slice(start, min(d, start + MOST_INNER))
            if num_rows <= MOST_STACKED_ROWS:
                _multiply_few(rows[:, inner], right[inner], reply, bits)
            else:
                _multiply_many(rows[:, inner], right[inner], reply, bits, chosen, start > 0, blocks)
    return reply


def on(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context in which Triton launches kernels on the device; by default it uses the thread's current one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _multiply_few(rows: torch.Tensor, weight: torch.Tensor, reply: torch.Tensor, bits: int) -> None:
    (num_rows, d), m = rows.shape, reply.shape[1]
    height = max(4, 1 << (num_rows - 1).bit_length())  # The matrix units take at least 16 rows of limbs.
    is_split = num_rows > MOST_FEW_ROWS
    left = _split(rows, bits, "planes") if is_split else rows
    plane_stride = left.stride(0) if is_split else 0
    blocks = STACKED_BLOCKS if is_split else FEW_BLOCKS
    grid = (-(-m // blocks["BLOCK_N"]), blocks["SPLITS"])
    kernels().multiply_few[grid](
        left, weight, reply, num_rows, d, m, left.stride(-2), left.stride(-1), plane_stride, weight.stride(1),
        NUM_PLANES=bits // 8, IS_SPLIT=is_split, ROWS=height, **blocks,
    )  # fmt: skip


def _split(rows: torch.Tensor, bits: int, form: Form) -> torch.Tensor:
    """Returns the digits of rows, lowest first, in the form's dtype: shape (number of planes, num_rows, d rounded up to
    a multiple of `_ALIGNED`), contiguous."""
    num_rows, d = rows.shape
    width = -(-d // _ALIGNED) * _ALIGNED
    digits = (2, 12) if bits == 24 else (3, 11)
    count, dtype = (digits[0], torch.float16) if form == "digits" else (bits // 8, torch.int8)
    planes = torch.empty(count, num_rows, width, dtype=dtype, device=rows.device)
    given = rows, planes, d, width, rows.stride(0), rows.stride(1), planes.stride(0)
    grid = (num_rows, -(-width // SPLIT_BLOCKS["BLOCK"]))
    if form == "digits":
        kernels().split_digits[grid](*given, NUM_PLANES=count, BITS=digits[1], **SPLIT_BLOCKS)
    else:
        kernels().split_limbs[grid](*given, NUM_PLANES=count, **SPLIT_BLOCKS)
    return planes


def _multiply_many(
    rows: torch.Tensor,
    weight: torch.Tensor,
    reply: torch.Tensor,
    bits: int,
    form: Form,
    adds: bool,
    blocks: dict[str, int] | None,
) -> None:
    (num_rows, d), m = rows.shape, reply.shape[1]
    if form == "described" and (weight.stride(1) % _ALIGNED or weight.data_ptr() % _ALIGNED):
        form = "horner"  # The copy engine wants rows of whole 16 bytes.
    planes = _split(rows, bits, form)
    count, _, width = planes.shape
    blocks = blocks or blocks_of(form, num_rows, m, rows.device)
    programs = (-(-num_rows // blocks["BLOCK_M"]) * -(-m // blocks["BLOCK_N"]),)
    given: dict[str, Any] = {"NUM_PLANES": count, "ADDS": adds, "GROUP_M": 8, **blocks}
    if form == "described":
        left = _described(planes.view(-1, width), blocks["BLOCK_M"], blocks["BLOCK_K"])
        right = _described(weight.t(), blocks["BLOCK_N"], blocks["BLOCK_K"])
        kernels().multiply_described[programs](left, right, reply, num_rows, d, m, **given)
        return
    operands = planes, weight, reply, num_rows, d, m, width, planes.stride(0), weight.stride(1)
    if form == "digits":
        kernels().multiply_digits[programs](*operands, BITS=12 if bits == 24 else 11, **given)
        return
    kernels().multiply_planes[programs](*operands, SUM_PER_PLANE=form == "planes", **given)


def blocks_of(form: Form, num_rows: int, m: int, device: torch.device) -> dict[str, int]:
    """Returns the block sizes of a form: large or small ones, whichever keep the chip's units busy for less time. Small
    blocks take `_SMALL_COST` times as long for the same work."""
    large, small = BLOCKS[form], SMALL_BLOCKS.get(form)
    if small is None:
        return large

    def busy(blocks: dict[str, int]) -> int:
        """Returns how many numbers of the reply a unit computes one after another, if each does a block at a time."""
        height, width = blocks["BLOCK_M"], blocks["BLOCK_N"]
        num_blocks = -(-num_rows // height) * -(-m // width)
        return -(-num_blocks // num_units(device)) * height * width

    return small if _SMALL_COST * busy(small) < busy(large) else large


@functools.cache
def num_units(device: torch.device) -> int:
    """Returns the number of multiprocessors of a CUDA device; 1 for the CPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def _described(matrix: torch.Tensor, height: int, width: int) -> Any:
    """Returns a descriptor of an int8 matrix whose rows are contiguous, for blocks of the given size."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [height, width])


# The self-test

_TESTED = ((1, 8, 8), (3, 40, 24), (16, 300, 130), (17, 100, 30), (70, 40, 24), (130, 2048, 264))
"""The shapes (num_rows, d, m) that the self-test multiplies: few rows and many, with and without padding, and with a
weight that `described` leaves to `horner`."""
_TESTED_EXTREMES = (3, MOST_FEW_ROWS + 1, MOST_STACKED_ROWS + 1)
"""The numbers of rows of `extreme_operands` in the self-test: few, those that are split and stacked, and many."""


@functools.cache
def is_exact(device: torch.device) -> bool:
    """Tells whether Triton is installed and its kernels are exact on a device. The result is computed once for each
    device. One line is logged if installed kernels cannot be used."""
    try:
        passes = exact_form(device) is not None
    except ImportError:
        return False  # The extra is not installed, which is no fault.
    except Exception as exc:  # noqa: BLE001 - compilers, drivers and kernels fail in many ways; the fallback is exact
        _LOGGER.warning("Triton's kernels are not used on %s, cuBLAS' are: %s", device, _reason(exc))
        return False
    if not passes:
        _LOGGER.warning("Triton's kernels are not exact on %s, and are not used", device)
    return passes


def _reason(exc: Exception) -> str:
    if "C compiler" in str(exc):
        return "Triton finds no C compiler; install gcc or clang, or name one in CC"
    return type(exc).__name__


def passes_self_test(multiply: Any, device: torch.device) -> bool:
    """Tells whether a function multiplies random and extreme numbers on a device as int64 arithmetic does on the CPU.

    At the largest odd inner width, 2^31 - 1 meets weights of 1 and -1. Its highest limb is -128 and its lowest -1, so
    that an odd number of them leaves -2^31 when the lowest plane begins, from where the sum must wrap. Limbs of -128
    that meet weights of -128 and 127 tell whether a plane's sum leaves int32.

    Args:
        multiply: maps int32 rows and an int8 weight on the device to their product, as `product` does.
        device: the device.
    """
    return all(_is_exact_for(multiply, device, *_random(*shape)) for shape in _TESTED) and all(
        _is_exact_for(multiply, device, *extreme_operands(num_rows)) for num_rows in _TESTED_EXTREMES
    )


def _random(num_rows: int, d: int, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(d)
    rows = torch.randint(-(2**31), 2**31, (num_rows, d), generator=generator, device="cpu").to(torch.int32)
    rows[::3], rows[1::3] = 0x7F7F7F7F, 0x7F7F7F80  # All limbs are 127, or all are -128.
    weight = torch.randint(-128, 128, (d, m), generator=generator, device="cpu").to(torch.int8)
    weight[:, ::3], weight[:, 1::3] = -128, 127
    return rows, weight


def extreme_operands(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows and the weight at which sums saturate or leave int32; see `passes_self_test`."""
    rows = torch.full((num_rows, MOST_INNER - 1), 2**31 - 1, dtype=torch.int32, device="cpu")
    rows[1::3], rows[2::3] = 0x7F7F7F80, -(2**31)
    weight = torch.ones(MOST_INNER - 1, 8, dtype=torch.int8, device="cpu")
    for column, value in enumerate((1, -1, -128, 127)):
        weight[:, column] = value
    weight[::2, 4], weight[1::2, 5] = -1, -128
    return rows, weight


def _is_exact_for(multiply: Any, device: torch.device, rows: torch.Tensor, weight: torch.Tensor) -> bool:
    exact = (rows.to(torch.int64) @ weight.to(torch.int64)).to(torch.int32)  # The conversion keeps the low 32 bits.
    there = rows.to(device)
    layouts = weight.to(device), weight.t().contiguous().to(device).t()
    return all(torch.equal(multiply(there, each).to("cpu"), exact) for each in layouts)
