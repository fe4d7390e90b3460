"""This module multiplies int32 rows by int8 weights mod 2^32, with the kernel that suits the machine and the number of
rows.

Guarantees: every kernel is exact mod 2^32 for all numbers, shapes and memory orders, so the choice of a kernel changes
nothing but the time. On a CPU the first kernel of this list that applies is used:

- the compiled kernels of wire/ring/kernels.py, if these use VNNI or if torch's private `_int_mm` is not fast;
- `torch._int_mm` on the four bytes of each number (limbs), if it is exact and fast;
- an integer loop for few rows;
- float64 products of blocks for many rows.

CUDA devices use wire/ring/product_triton.py if Triton is installed and its kernels are exact on the device, or else
wire/ring/product_cuda.py if that is exact there. All other devices use `plain_product`, with which tests compare every
kernel.

Memory: each thread keeps about `_SCRATCH_BYTES` of scratch memory between calls, since fresh pages cost time:
converting a 2048 × 2048 weight to float64 takes 20 ms in a new tensor and 1 ms in a tensor that was used before.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from runtime.threads import use_one_core
from wire.errors import InvalidTensor
from wire.ring import kernels as compiled
from wire.ring import product_cuda
from wire.ring.buffers import unwritten_tensor
from wire.ring.tiles import RowsAndReply, row_blocks

_EXACT_FLOAT64_ROWS = 1 << 15
"""The most products of an int32 and an int8 number that float64 sums without rounding: 2^31 · 128 · 2^15 = 2^53."""
_ROUNDER = 1.5 * 2.0**52
"""A float64 r such that the low 32 of the 64 bits that represent x + r are x mod 2^32, for every integer |x| <= 2^51;
see `_multiply_slice`."""
_EXACT_ROUNDER_ROWS = 1 << 13
"""The most products that may be added to `_ROUNDER` without rounding: 2^31 · 128 · 2^13 = 2^51."""
_FAST_INNER_ROWS = 1 << 11
"""The rows of the weight that are multiplied at a time. Larger slices would be exact too, but with a weight of 11,008
rows a product took 15% less time in slices of 2^11 rows than in slices of 2^13."""
_BYTE_VALUES = torch.tensor([[1, 1 << 8, 1 << 16, 1 << 24]], dtype=torch.int32, device="cpu")
_FEW_ROWS = 4
_FEW_ROWS_BY_INT32 = 48
"""The bound of (number of rows) · (1 + torch's threads) up to which the integer loop is used. The loop always runs in
one thread. On an AVX2 machine it was faster than float64 in one thread up to 24 rows, and than float64 in two threads
up to 16 rows."""
_SCRATCH_BYTES = 32 << 20
"""The most bytes of scratch memory that each multiplying thread keeps, unless 32 rows need more. About 600 rows
fit if the weight is 768 × 3,072."""
_LEAST_BLOCK = 32
_SLOWER = 8.0
"""`_int_mm` counts as fast if it takes less than this many times the time of the int32 loop. On one core it takes 25
times as long if it is a plain loop itself. With VNNI it should take about as long as the int32 loop; this was computed
from the speed that noise/polynomial/negacyclic.py states, 850 GOP/s, and not measured."""
_local = threading.local()

Kernel = Callable[[Sequence[torch.Tensor], torch.Tensor], list[torch.Tensor]]
"""Maps (matrices of rows, weight) to the product of each matrix with the weight. Each product has memory of its own."""


def product(rows: torch.Tensor, weight: torch.Tensor, are_secret: bool = False) -> torch.Tensor:
    """Computes rows · weight mod 2^32, exactly.

    Args:
        rows: int32, shape (num_rows, d), contiguous or not, CPU or CUDA.
        weight: int8, shape (d, m), same device; contiguous or a transposed view.
        are_secret: whether the rows are not masked. The compiled kernels, which else take less time for rows of 24
            bits, then take as long for all rows.

    Returns:
        int32, shape (num_rows, m).

    Raises:
        InvalidTensor: a dtype is wrong, or the inner widths differ.
    """
    _check(rows, weight)
    name = choose(rows.shape[0], weight)
    if are_secret and name == "compiled":
        return _by_compiled([rows], weight, are_secret)[0]
    return KERNELS[name]([rows], weight)[0]


def products(parts: Sequence[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    """Computes `product` of each matrix, multiplying the rows of all matrices together, which is faster than one by
    one.

    Args:
        parts: one matrix or more, each int32, shape (its number of rows, d), contiguous or not, all on one device.
        weight: int8, shape (d, m), on the same device.

    Returns:
        For each matrix its product, int32, shape (its number of rows, m), with memory of its own.

    Raises:
        InvalidTensor: see `product`.
    """
    for rows in parts:
        _check(rows, weight)
    return KERNELS[choose(sum(rows.shape[0] for rows in parts), weight)](parts, weight)


def _check(rows: torch.Tensor, weight: torch.Tensor) -> None:
    if rows.dtype != torch.int32 or weight.dtype != torch.int8 or rows.shape[1] != weight.shape[0]:
        raise InvalidTensor(f"expected int32 rows of {weight.shape[0]} columns, got {rows.dtype} of {rows.shape[1]}")


def choose(num_rows: int, weight: torch.Tensor) -> str:
    """Returns the name, a key of `KERNELS`, of the kernel that suits this machine, the weight and the number of rows.

    Args:
        num_rows: the rows of all matrices that are multiplied together.
        weight: int8, shape (d, m); only its shape, strides and device count.
    """
    if weight.is_cuda:
        return "CUDA"
    if not weight.is_cpu:
        return "plain"
    if compiled.available() and compiled.suits(weight) and (compiled.has_vnni() or not int_mm_is_fast()):
        return "compiled"
    if min(weight.shape) > 1 and num_rows and int_mm_is_fast():
        return "limbs, few rows" if num_rows <= _FEW_ROWS else "limbs"
    is_few = num_rows * (1 + torch.get_num_threads()) <= _FEW_ROWS_BY_INT32
    return "int32" if is_few else "float64"


def _plainly(parts: Sequence[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    return [plain_product(rows, weight) for rows in parts]


def plain_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes `product` in the simplest way, on any device. Every kernel must give the same numbers.

    Args:
        rows: int32, shape (num_rows, d).
        weight: int8, shape (d, m), same device.

    Returns:
        int32, shape (num_rows, m).
    """
    total = torch.zeros(rows.shape[0], weight.shape[1], dtype=torch.int64, device=rows.device)
    for start in range(0, rows.shape[1], _EXACT_FLOAT64_ROWS):
        stop = start + _EXACT_FLOAT64_ROWS
        total += (rows[:, start:stop].to(torch.float64) @ weight[start:stop].to(torch.float64)).to(torch.int64)
    return to_int32(total)


def to_int32(wide: torch.Tensor) -> torch.Tensor:
    """Reduces int64 numbers mod 2^32 to the range of int32."""
    return ((wide + (1 << 31)).remainder(1 << 32) - (1 << 31)).to(torch.int32)


def _together(
    kernel: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], parts: Sequence[torch.Tensor], weight: torch.Tensor
) -> list[torch.Tensor]:
    """Joins the matrices, multiplies them with a kernel that takes one matrix, and splits the product."""
    if len(parts) == 1:
        return [kernel(parts[0], weight)]
    reply = kernel(torch.cat(list(parts)), weight)
    return [part.clone() for part in reply.split([rows.shape[0] for rows in parts])]


# CUDA


def _by_cuda(parts: Sequence[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    kernel = _kernel_on(weight.device)
    return _plainly(parts, weight) if kernel is None else _together(kernel, parts, weight)


def _kernel_on(device: torch.device) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Returns the first kernel that is exact on a CUDA device: Triton's, which needs the extra `gpu`, or cuBLAS'. None
    if neither is exact."""
    from wire.ring import product_triton

    if product_triton.is_exact(device):
        return product_triton.product
    return product_cuda.product if product_cuda.is_exact(device) else None


def is_exact_on(device: torch.device, again: bool = False) -> bool:
    """Tells whether a CUDA device passes the self-test of a kernel that uses its matrix units; returns False also if
    the device does not answer. On a device that fails, `product` computes in float64, exactly and slowly.

    Args:
        device: the CUDA device, with its index.
        again: whether the test is made again, because the device may have failed since.
    """
    from wire.ring import product_triton

    if again:
        product_triton.is_exact.cache_clear()
        product_triton.exact_form.cache_clear()
        product_cuda.is_exact.cache_clear()
    return _kernel_on(device) is not None


# Compiled


def _by_compiled(parts: Sequence[torch.Tensor], weight: torch.Tensor, are_secret: bool = False) -> list[torch.Tensor]:
    replies = _empty_replies(parts, weight.shape[1])
    compiled.products(parts, weight, replies, are_secret)
    return replies


# Byte limbs


def _few_by_limbs(parts: Sequence[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    return _together(_product_by_limbs, parts, weight)


def _product_by_limbs(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes the product with one int8 GEMM, in which each row is replaced by four rows: one for each of the four
    bytes of its numbers. This requires a little-endian machine."""
    num_rows = rows.shape[0]
    parts = product_cuda.multiply(_limbs(rows).reshape(4 * num_rows, -1), weight)
    # This is one call in place of three: sums in int32 wrap mod 2^32, and for so few numbers the plain loop is fast.
    return torch.mm(_BYTE_VALUES, parts.view(4, -1)).view(num_rows, weight.shape[1])


def _limbs(rows: torch.Tensor) -> torch.Tensor:
    """Returns the four bytes of each int32 number, lowest first, uint8, shape (4, num_rows, d)."""
    num_rows, d = rows.shape
    return rows.contiguous().view(torch.uint8).view(num_rows, d, 4).permute(2, 0, 1)


def _many_by_limbs(parts: Sequence[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    """Multiplies many rows like `_product_by_limbs`, but one block of rows at a time, in scratch memory that is kept
    between calls, since fresh pages took a third more time."""
    d, m = weight.shape
    replies = _empty_replies(parts, m)
    num_rows = sum(rows.shape[0] for rows in parts)
    step = max(_LEAST_BLOCK, min(num_rows, _SCRATCH_BYTES // (4 * d + 16 * m)))
    for block in row_blocks(parts, replies, step):
        count = sum(rows.shape[0] for rows, _ in block)
        stacked, sums = _scratch(4 * count * d, 16 * count * m)
        stacked, place = stacked.view(4, count, d), 0
        for rows, _ in block:
            stacked[:, place : place + rows.shape[0]].copy_(_limbs(rows))
            place += rows.shape[0]
        sums = sums.view(torch.int32).view(4 * count, m)
        product_cuda.multiply(stacked.view(4 * count, d), weight, out=sums)
        sums, place = sums.view(4, count, m), 0
        for _, target in block:
            first, second, third, fourth = sums[:, place : place + target.shape[0]]
            torch.add(first, second, alpha=1 << 8, out=target)  # int32 wraps mod 2^32, as the ring requires.
            target.add_(third, alpha=1 << 16).add_(fourth, alpha=1 << 24)
            place += target.shape[0]
    return replies


# int32


def _few_by_int32(parts: Sequence[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    return _together(_product_by_int32, parts, weight)


def _product_by_int32(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Converts the weight to int32, some columns at a time, and multiplies with torch's int32 loop, which wraps mod
    2^32."""
    d, m = weight.shape
    step = max(_LEAST_BLOCK, _SCRATCH_BYTES // (8 * max(1, d)))
    if m <= step:
        return torch.mm(rows, _widened(weight))
    reply = torch.empty(rows.shape[0], m, dtype=torch.int32, device="cpu")
    for columns in _slices(m, step):
        torch.mm(rows, _widened(weight[:, columns]), out=reply[:, columns])
    return reply


def _widened(narrow: torch.Tensor) -> torch.Tensor:
    return _filled(_buffer(4 * narrow.numel()).view(torch.int32), narrow)


# float64


def _many_by_float64(parts: Sequence[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    """Converts blocks of rows and of the weight to float64, in scratch memory, and multiplies them."""
    replies = _empty_replies(parts, weight.shape[1])
    inner, columns, step = _block_shape(sum(rows.shape[0] for rows in parts), weight)
    for block in row_blocks(parts, replies, step):
        for start in range(0, max(1, weight.shape[0]), inner):
            _multiply_slice(block, weight, slice(start, start + inner), columns)
    return replies


def _block_shape(num_rows: int, weight: torch.Tensor) -> tuple[int, int, int]:
    """Returns the block sizes that fit the scratch memory: rows of the weight, columns of the weight, and rows to
    multiply. The weight's block takes at most about half."""
    room = _SCRATCH_BYTES // 8
    inner = max(1, min(weight.shape[0], _EXACT_ROUNDER_ROWS, _FAST_INNER_ROWS))
    columns = max(_LEAST_BLOCK, min(weight.shape[1], room // 2 // inner))
    step = max(_LEAST_BLOCK, min(num_rows, (room - inner * columns) // (inner + columns)))
    return inner, columns, step


def _multiply_slice(block: list[RowsAndReply], weight: torch.Tensor, inner: slice, columns: int) -> None:
    """Multiplies a block of rows by the weight's rows in the slice `inner`. The first slice's product is written to the
    reply; later ones are added to it.

    Sums begin at 1.5 · 2^52. Between 2^52 and 2^53 a float64 has unit spacing and ends in the integer's low 52 bits, of
    which the lowest 32 are the sum mod 2^32, in two's complement. The sum is exact in whatever order a library adds,
    with or without fused operations: a product is an integer of at most 2^38 in size, a partial sum without the 1.5 ·
    2^52 is at most 2^51 in size, and a partial sum with it lies between 2^52 and 2^53. No such number is ever rounded.
    """
    weight, count = weight[inner], sum(rows.shape[0] for rows, _ in block)
    width = min(columns, weight.shape[1])
    areas = _scratch(8 * count * weight.shape[0], 8 * weight.shape[0] * width, 8 * count * width)
    numbers, wide, sums = (area.view(torch.float64) for area in areas)
    numbers = _gathered(numbers, [rows[:, inner] for rows, _ in block])
    for part in _slices(weight.shape[1], columns):
        narrow = weight[:, part]
        total = sums[: count * narrow.shape[1]].view(count, narrow.shape[1]).fill_(_ROUNDER)
        bits, place = total.addmm_(numbers, _filled(wide, narrow)).view(torch.int64), 0
        for rows, target in block:
            found = bits[place : place + rows.shape[0]]
            # int64 into int32 keeps the low half, whatever the byte order.
            if inner.start:
                target[:, part].add_(found)
            else:
                target[:, part].copy_(found)
            place += rows.shape[0]


def _gathered(buffer: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Copies the rows of all matrices into the buffer, as the rows of one matrix, and returns that matrix."""
    if len(parts) == 1:
        return _filled(buffer, parts[0])
    together, place = buffer.view(-1, parts[0].shape[1]), 0
    for rows in parts:
        together[place : place + rows.shape[0]].copy_(rows)
        place += rows.shape[0]
    return together


def _filled(buffer: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Copies a matrix into the buffer, converted to the buffer's dtype, and returns the copy. The copy has the matrix's
    memory order, since a transposing copy is slow."""
    height, width = matrix.shape
    strides = (1, height) if matrix.stride(0) < matrix.stride(1) else (width, 1)
    return buffer.as_strided((height, width), strides).copy_(matrix)


KERNELS: dict[str, Kernel] = {
    "plain": _plainly,
    "CUDA": _by_cuda,
    "compiled": _by_compiled,
    "limbs, few rows": _few_by_limbs,
    "limbs": _many_by_limbs,
    "int32": _few_by_int32,
    "float64": _many_by_float64,
}
"""Maps the name that `choose` returns to the kernel. All kernels take the arguments of `products` and give the same
numbers."""


# Blocks and scratch memory


def _empty_replies(parts: Sequence[torch.Tensor], m: int) -> list[torch.Tensor]:
    return [unwritten_tensor(rows.shape[0], m, torch.int32) for rows in parts]


def _slices(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(length, start + step))


def _scratch(*sizes: int) -> list[torch.Tensor]:
    """Returns one part of this thread's scratch memory for each size in bytes."""
    ends = list(itertools.accumulate(-(-size // 64) * 64 for size in sizes))  # Each part begins on a cache line.
    buffer = _buffer(ends[-1])
    return [buffer[start : start + size] for start, size in zip([0, *ends], sizes, strict=False)]


def _buffer(least: int) -> torch.Tensor:
    """Returns this thread's scratch memory, uint8, at least `least` bytes. The thread's next call may return the same
    memory."""
    buffer: torch.Tensor | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.shape[0] < least:
        # A buffer made in inference mode could not be written to outside of it, for this thread's life.
        with torch.inference_mode(False):
            buffer = _local.buffer = torch.empty(-(-least // 64) * 64, dtype=torch.uint8, device="cpu")
    return buffer


# The choice


@functools.cache
def int_mm_is_fast() -> bool:
    """Tells whether `torch._int_mm` is exact and fast on this machine. The first call measures it for some
    milliseconds."""
    return int_mm_is_exact() and _int_mm_keeps_up()


@functools.cache
def int_mm_is_exact() -> bool:
    """Tells whether torch's private `_int_mm` multiplies uint8 by int8 exactly on this machine; older CPU kernels
    saturate."""
    limbs = torch.full((4, 512), 255, dtype=torch.uint8, device="cpu")
    weight = torch.full((512, 16), -127, dtype=torch.int8, device="cpu")
    weight[:, 1::2] = 127
    exact = limbs.to(torch.int64) @ weight.to(torch.int64)
    try:
        layouts = (weight, weight.t().contiguous().t())
        return all(torch.equal(product_cuda.multiply(limbs, w).to(torch.int64), exact) for w in layouts)
    except (RuntimeError, AttributeError):
        return False


def _int_mm_keeps_up() -> bool:
    """Tells whether a product of limbs (the bytes of the numbers) by `_int_mm` takes less than `_SLOWER` times the time
    of the int32 loop, at a medium size.

    The comparison runs in a thread of its own, which uses one core: OpenMP threads on several cores would wait 8 ms for
    a core that is busy with other work. The fastest of several tries counts, since other work can only slow a try.
    """
    ones = functools.partial(torch.ones, device="cpu")
    limbs, narrow = ones(4 * 8, 256, dtype=torch.uint8), ones(256, 256, dtype=torch.int8)
    rows, wide = ones(8, 256, dtype=torch.int32), ones(256, 256, dtype=torch.int32)
    found: list[bool] = []

    def compare() -> None:
        use_one_core()
        limit_s = _SLOWER * min(_seconds(lambda: torch.mm(rows, wide)) for _ in range(8))
        found.append(any(_seconds(lambda: product_cuda.multiply(limbs, narrow)) < limit_s for _ in range(4)))

    thread = threading.Thread(target=compare)
    thread.start()
    thread.join()
    return found == [True]


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
