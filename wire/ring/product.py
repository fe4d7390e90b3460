"""The product mod 2^32 of int32 rows and int8 weights, by the kernel that suits the machine and the number of rows.

Guarantees: every kernel is exact mod 2^32 for all numbers, shapes and memory orders, so that the choice changes nothing
but the time. On a CPU these are tried in turn: the compiled kernels of wire/ring/kernels.py, where they were built and
the processor has AVX2; byte limbs by the private `torch._int_mm`, where that is exact and fast (processors with VNNI)
and the compiled kernels know no VNNI; else an integer loop for few rows and float64 in blocks for many. CUDA devices
use wire/ring/product_cuda.py where it is exact. Other devices take the plain form, which tests compare with, too.

Memory: a thread keeps `_SCRATCH_BYTES` of scratch between calls, and a call takes nothing else but its reply. Fresh
pages are what costs: converting a 2048 × 2048 weight into a new float64 tensor takes 20 ms, into a warm one 1 ms.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from wire.errors import InvalidTensor
from wire.ring import int_mm
from wire.ring import kernels as compiled
from wire.ring.buffers import unwritten_tensor
from wire.ring.threads import use_one_core

_EXACT_FLOAT64_ROWS = 1 << 15
"""Inner rows whose products sum without rounding in float64: 2^31 · 128 · 2^15 = 2^53."""
_ROUNDER = 1.5 * 2.0**52
"""A float64 for which the low 32 bits of x + this are x mod 2^32, for an integer |x| <= 2^51; see `_multiply_piece`."""
_EXACT_ROUNDER_ROWS = 1 << 13
"""Inner rows whose products sum exactly beside `_ROUNDER`: 2^31 · 128 · 2^13 = 2^51."""
_FAST_INNER_ROWS = 1 << 11
"""Inner rows taken at a time, fewer than would be exact: with 11,008 of them a product took 15% less time so than in
pieces of 2^13."""
_BYTE_VALUES = torch.tensor([[1, 1 << 8, 1 << 16, 1 << 24]], dtype=torch.int32, device="cpu")
_FEW_ROWS = 4
_FEW_ROWS_BY_INT32 = 48
"""Most rows for the integer loop, after division by torch's threads and one. The loop always runs in one thread, and is
faster than float64 up to 24 rows against one thread and 16 against two, measured on an AVX2 machine."""
_SCRATCH_BYTES = 32 << 20
"""Most bytes of scratch that each multiplying thread keeps, or what 32 rows need where that is more; for a layer with
3,072 outputs a block has 600 rows."""
_LEAST_BLOCK = 32
_SLOWER = 8.0
"""How many times as long as the int32 loop `_int_mm` may take to count as fast. On one core `_int_mm` of the limbs
takes 25 times as long where it is a plain loop itself. With VNNI it should take about as long: reckoned from the 850
GOP/s of noise/polynomial/negacyclic.py, not measured."""
_local = threading.local()

_Pair = tuple[torch.Tensor, torch.Tensor]
"""Some rows and the memory for their product."""
Kernel = Callable[[Sequence[torch.Tensor], torch.Tensor], list[torch.Tensor]]
"""(matrices, weight) → the product of each, with memory of its own."""


def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes rows · weight mod 2^32, exactly.

    Args:
        rows: int32, shape (num_rows, d), contiguous or not, CPU or CUDA.
        weight: int8, shape (d, m), same device; a transposed view is as good as a contiguous one.

    Returns:
        int32, shape (num_rows, m).

    Raises:
        InvalidTensor: a dtype is wrong, or the shapes do not meet.
    """
    _check(rows, weight)
    return KERNELS[choose(rows.shape[0], weight)]([rows], weight)[0]


def products(parts: Sequence[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    """Computes `product` of each matrix, by one multiplication of all their rows together; only a few rows are copied
    for it.

    Args:
        parts: at least one, each int32, shape (its rows, d), contiguous or not, same device.
        weight: int8, shape (d, m).

    Returns:
        int32, shape (its rows, m) each, with memory of their own.

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
    """Returns the name in `KERNELS` of the kernel that suits this machine, the weight and so many rows.

    Args:
        num_rows: the rows of all matrices that are multiplied together.
        weight: int8, shape (d, m); its numbers do not matter.
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
    """Computes `product` in the plainest way, on any device: every kernel must give the same numbers.

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
    """Reduces int64 numbers mod 2^32 into the int32 that stands for them."""
    return ((wide + (1 << 31)).remainder(1 << 32) - (1 << 31)).to(torch.int32)


def _together(
    kernel: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], parts: Sequence[torch.Tensor], weight: torch.Tensor
) -> list[torch.Tensor]:
    """Multiplies by a kernel for one matrix: with few rows, copying costs less than avoiding copies."""
    if len(parts) == 1:
        return [kernel(parts[0], weight)]
    reply = kernel(torch.cat(list(parts)), weight)
    return [part.clone() for part in reply.split([rows.shape[0] for rows in parts])]


# CUDA


def _by_cuda(parts: Sequence[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    from wire.ring import product_cuda

    if not product_cuda.is_exact(weight.device):
        return _plainly(parts, weight)
    return _together(product_cuda.product, parts, weight)


# Compiled


def _by_compiled(parts: Sequence[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    replies = _empty_replies(parts, weight.shape[1])
    compiled.products(parts, weight, replies)
    return replies


# Byte limbs


def _few_by_limbs(parts: Sequence[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    return _together(_product_by_limbs, parts, weight)


def _product_by_limbs(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Runs one int8 GEMM over the four bytes of each number, stacked as rows; little-endian byte order."""
    num_rows = rows.shape[0]
    parts = int_mm.multiply(_limbs(rows).reshape(4 * num_rows, -1), weight)
    # This is one call in place of three: sums in int32 wrap mod 2^32, and for so few numbers the plain loop is fast.
    return torch.mm(_BYTE_VALUES, parts.view(4, -1)).view(num_rows, weight.shape[1])


def _limbs(rows: torch.Tensor) -> torch.Tensor:
    """Returns the four bytes of each number, uint8, shape (4, num_rows, d)."""
    num_rows, d = rows.shape
    return rows.contiguous().view(torch.uint8).view(num_rows, d, 4).permute(2, 0, 1)


def _many_by_limbs(parts: Sequence[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    """Does the same for many rows, a block at a time, in scratch memory that is kept: fresh pages cost a third more."""
    d, m = weight.shape
    replies = _empty_replies(parts, m)
    num_rows = sum(rows.shape[0] for rows in parts)
    step = max(_LEAST_BLOCK, min(num_rows, _SCRATCH_BYTES // (4 * d + 16 * m)))
    for block in _blocks(parts, replies, step):
        count = sum(rows.shape[0] for rows, _ in block)
        stacked, sums = _scratch(4 * count * d, 16 * count * m)
        stacked, place = stacked.view(4, count, d), 0
        for rows, _ in block:
            stacked[:, place : place + rows.shape[0]].copy_(_limbs(rows))
            place += rows.shape[0]
        sums = sums.view(torch.int32).view(4 * count, m)
        int_mm.multiply(stacked.view(4 * count, d), weight, out=sums)
        sums, place = sums.view(4, count, m), 0
        for _, target in block:
            first, second, third, fourth = sums[:, place : place + target.shape[0]]
            torch.add(first, second, alpha=1 << 8, out=target)  # int32 wraps mod 2^32, which is what the ring asks for.
            target.add_(third, alpha=1 << 16).add_(fourth, alpha=1 << 24)
            place += target.shape[0]
    return replies


# int32


def _few_by_int32(parts: Sequence[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    return _together(_product_by_int32, parts, weight)


def _product_by_int32(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Runs the plain loop over a converted weight, some columns at a time: int32 wraps mod 2^32 by itself."""
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
    """Runs float64 GEMMs of a block of rows by a block of the weight, both converted in scratch memory."""
    replies = _empty_replies(parts, weight.shape[1])
    inner, columns, step = _block_shape(sum(rows.shape[0] for rows in parts), weight)
    for block in _blocks(parts, replies, step):
        for start in range(0, max(1, weight.shape[0]), inner):
            _multiply_piece(block, weight, slice(start, start + inner), columns)
    return replies


def _block_shape(num_rows: int, weight: torch.Tensor) -> tuple[int, int, int]:
    """Returns how many of the weight's inner rows and columns, and how many rows, fit the scratch memory; half is for
    the weight."""
    room = _SCRATCH_BYTES // 8
    inner = max(1, min(weight.shape[0], _EXACT_ROUNDER_ROWS, _FAST_INNER_ROWS))
    columns = max(_LEAST_BLOCK, min(weight.shape[1], room // 2 // inner))
    step = max(_LEAST_BLOCK, min(num_rows, (room - inner * columns) // (inner + columns)))
    return inner, columns, step


def _multiply_piece(block: list[_Pair], weight: torch.Tensor, inner: slice, columns: int) -> None:
    """Multiplies one block with some inner rows of the weight: writes if they are the first, else adds.

    Sums begin at 1.5 · 2^52. Between 2^52 and 2^53 a float64 has unit spacing and ends in the integer's low 52 bits, of
    which the lowest 32 are the sum mod 2^32, in two's complement. It is exact in any order in which a library may add,
    fused or not: a product is an integer below 2^38; a partial sum without the 1.5 · 2^52 is at most 2^51 in size; one
    with it lies from 2^52 to 2^53. No such number is ever rounded.
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
    """Copies the rows of all parts, below each other, into the buffer."""
    if len(parts) == 1:
        return _filled(buffer, parts[0])
    together, place = buffer.view(-1, parts[0].shape[1]), 0
    for rows in parts:
        together[place : place + rows.shape[0]].copy_(rows)
        place += rows.shape[0]
    return together


def _filled(buffer: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Copies the matrix into the buffer, whose dtype it takes, in its own memory order: a copy that transposes is
    slow."""
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
"""Every kernel by the name that `choose` gives. All take what `products` takes and give the same numbers."""


# Blocks and scratch memory


def _empty_replies(parts: Sequence[torch.Tensor], m: int) -> list[torch.Tensor]:
    return [unwritten_tensor(rows.shape[0], m, torch.int32) for rows in parts]


def _slices(length: int, step: int) -> Iterator[slice]:
    for start in range(0, length, step):
        yield slice(start, min(length, start + step))


def _blocks(parts: Sequence[torch.Tensor], replies: Sequence[torch.Tensor], step: int) -> Iterator[list[_Pair]]:
    """Yields rows and the memory for their product, `step` rows at a time, no matter which parts they belong to."""
    block: list[_Pair] = []
    room = step
    for rows, reply in zip(parts, replies, strict=True):
        start = 0
        while start < rows.shape[0]:
            stop = min(rows.shape[0], start + room)
            block.append((rows[start:stop], reply[start:stop]))
            room, start = room - (stop - start), stop
            if not room:
                yield block
                block, room = [], step
    if block:
        yield block


def _scratch(*sizes: int) -> list[torch.Tensor]:
    """Cuts `_buffer` into one piece of each size in bytes."""
    ends = list(itertools.accumulate(-(-size // 64) * 64 for size in sizes))  # Each piece begins on a cache line.
    buffer = _buffer(ends[-1])
    return [buffer[start : start + size] for start, size in zip([0, *ends], sizes, strict=False)]


def _buffer(least: int) -> torch.Tensor:
    """Returns this thread's memory, uint8, a multiple of 64 bytes and at least so many, which its next call may use
    again."""
    buffer: torch.Tensor | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.shape[0] < least:
        # A buffer made in inference mode could not be written to outside of it, for this thread's life.
        with torch.inference_mode(False):
            buffer = _local.buffer = torch.empty(-(-least // 64) * 64, dtype=torch.uint8, device="cpu")
    return buffer


# The choice


@functools.cache
def int_mm_is_fast() -> bool:
    """Tells whether `torch._int_mm` is exact here and fast too. This is found once, by multiplying for some
    milliseconds."""
    return int_mm_is_exact() and _int_mm_keeps_up()


@functools.cache
def int_mm_is_exact() -> bool:
    """Tells whether this machine's private `torch._int_mm` multiplies uint8 by int8 exactly; older kernels
    saturated."""
    limbs = torch.full((4, 512), 255, dtype=torch.uint8, device="cpu")
    weight = torch.full((512, 16), -127, dtype=torch.int8, device="cpu")
    weight[:, 1::2] = 127
    exact = limbs.to(torch.int64) @ weight.to(torch.int64)
    try:
        layouts = (weight, weight.t().contiguous().t())
        return all(torch.equal(int_mm.multiply(limbs, w).to(torch.int64), exact) for w in layouts)
    except (RuntimeError, AttributeError):
        return False


def _int_mm_keeps_up() -> bool:
    """Tells whether a product by limbs takes less than `_SLOWER` times that of the int32 loop, at a middling size.

    The comparison runs in a thread of its own, which uses one core: an OpenMP team whose other core is busy waits 8 ms
    for it, every time, and that says nothing about kernels. Each has several tries, since other work can only slow
    them.
    """
    ones = functools.partial(torch.ones, device="cpu")
    limbs, narrow = ones(4 * 8, 256, dtype=torch.uint8), ones(256, 256, dtype=torch.int8)
    rows, wide = ones(8, 256, dtype=torch.int32), ones(256, 256, dtype=torch.int32)
    found: list[bool] = []

    def compare() -> None:
        use_one_core()
        limit_s = _SLOWER * min(_seconds(lambda: torch.mm(rows, wide)) for _ in range(8))
        found.append(any(_seconds(lambda: int_mm.multiply(limbs, narrow)) < limit_s for _ in range(4)))

    thread = threading.Thread(target=compare)
    thread.start()
    thread.join()
    return found == [True]


def _seconds(work: Callable[[], torch.Tensor]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
