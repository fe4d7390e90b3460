"""This module holds the Triton kernels of ring products on NVIDIA GPUs; wire/ring/product_triton.py launches them.

A number z mod 2^32 is split into signed digits: limbs of 8 bits for int8 units, or digits of 11 or 12 bits for float16
units. The products of the digits with the int8 weight are summed in int32 and joined by shifts, which wrap mod 2^32 as
the ring requires.

A sum that wraps is exact, and a sum that saturates is not. On some chips Triton's int8 product saturates (`satfinite`),
so `multiply_planes` has a form that adds each plane's products in a sum of its own, which cannot leave int32.
tests/wire/ring/test_triton_compiled.py reads from the compiled code which chips these are.

Only weights whose inner width is contiguous are fast, since the matrix units read both operands along it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def split_limbs(
    rows, planes, d, width, row_stride, column_stride, plane_stride,
    NUM_PLANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the signed bytes of one row's numbers, lowest first, to int8 planes of shape (NUM_PLANES, rows, width).
    The columns from d to width are zeros.

    Adding 128 to the three lower bytes carries into the next byte wherever a byte is 128 or more; flipping the highest
    bit of these bytes subtracts 128 again.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(rows + row * row_stride + at * column_stride, mask=at < d, other=0)
    turned = (z + 0x00808080) ^ 0x00808080
    for plane in tl.static_range(NUM_PLANES):
        limb = (turned >> (8 * plane)).to(tl.int8)
        tl.store(planes + tl.cast(plane_stride, tl.int64) * plane + row * width + at, limb, mask=at < width)


@triton.jit
def split_digits(
    rows, planes, d, width, row_stride, column_stride, plane_stride,
    NUM_PLANES: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes the signed digits of BITS bits of one row's numbers, lowest first, to float16 planes, laid out as in
    `split_limbs`. A digit is at most 2^(BITS - 1) in size, which float16 holds exactly up to 2^11."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(rows + row * row_stride + at * column_stride, mask=at < d, other=0)
    half: tl.constexpr = 1 << (BITS - 1)
    for plane in tl.static_range(NUM_PLANES):
        digit = ((z + half) & (2 * half - 1)) - half
        tl.store(
            planes + tl.cast(plane_stride, tl.int64) * plane + row * width + at, digit.to(tl.float16), mask=at < width
        )
        # The difference may wrap, which changes the quotient by a multiple of 2^(32 - BITS): nothing mod 2^32.
        z = (z - digit) >> BITS


@triton.jit
def _place(num_rows, m, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Returns the first row and the first column of this program's block. Programs that run at the same time share rows
    and columns, so that the cache serves them."""
    program = tl.program_id(0)
    blocks_m, blocks_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(m, BLOCK_N)
    in_group = GROUP_M * blocks_n
    first = program // in_group * GROUP_M
    height = min(blocks_m - first, GROUP_M)
    return (first + program % in_group % height) * BLOCK_M, program % in_group // height * BLOCK_N


@triton.jit
def _store(reply, total, row, column, num_rows, m, ADDS: tl.constexpr):
    """Writes this program's block to `reply`, or adds it."""
    to = reply + row.to(tl.int64)[:, None] * m + column[None, :]
    is_real = (row < num_rows)[:, None] & (column < m)[None, :]
    if ADDS:
        total += tl.load(to, mask=is_real, other=0)
    tl.store(to, total, mask=is_real)


@triton.jit
def multiply_planes(
    planes, weight, reply, num_rows, d, m, row_stride, plane_stride, column_stride,
    NUM_PLANES: tl.constexpr, SUM_PER_PLANE: tl.constexpr, ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Multiplies planes of limbs by the weight, the highest plane first: before each plane the sum is shifted by eight
    bits (Horner's rule). Writes to `reply`, int32, shape (num_rows, m), contiguous, or adds to it if ADDS.

    With SUM_PER_PLANE each plane's products have a sum of their own: exact on units that saturate, for d below 2^17.
    Without it, one sum serves all planes: exact only on units whose sums wrap mod 2^32.
    """
    first_row, first_column = _place(num_rows, m, BLOCK_M, BLOCK_N, GROUP_M)
    row, column = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    # Rows and columns past the end read others' numbers; their results are not stored.
    left = planes + (row % num_rows).to(tl.int64)[:, None] * row_stride + inner[None, :]
    right = weight + (column % m).to(tl.int64)[None, :] * column_stride + inner[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for index in range(NUM_PLANES):
        plane = left + tl.cast(plane_stride, tl.int64) * (NUM_PLANES - 1 - index)
        total = total << 8
        part = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32) if SUM_PER_PLANE else total
        for start in range(0, d, BLOCK_K):
            is_inside = inner < d - start
            a = tl.load(plane + start, mask=is_inside[None, :], other=0)
            b = tl.load(right + start, mask=is_inside[:, None], other=0)
            part = tl.dot(a, b, part, out_dtype=tl.int32)
        if SUM_PER_PLANE:
            total += part
        else:
            total = part
    _store(reply, total, row, column, num_rows, m, ADDS)


@triton.jit
def multiply_described(
    planes, weight, reply, num_rows, d, m,
    NUM_PLANES: tl.constexpr, ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Computes `multiply_planes` without SUM_PER_PLANE from tensor descriptors, which the copy engine of sm_90 and
    later reads by itself: `planes` describes int8 (NUM_PLANES · num_rows, width) in blocks of (BLOCK_M, BLOCK_K), and
    `weight` describes the transposed weight in blocks of (BLOCK_N, BLOCK_K). What lies past a described matrix is read
    as zeros; a block that reaches into the next plane reads rows whose results are not stored."""
    first_row, first_column = _place(num_rows, m, BLOCK_M, BLOCK_N, GROUP_M)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for index in range(NUM_PLANES):
        at = (NUM_PLANES - 1 - index) * num_rows + first_row
        total = total << 8
        for start in range(0, d, BLOCK_K):
            total = tl.dot(planes.load([at, start]), weight.load([first_column, start]).T, total, out_dtype=tl.int32)
    row, column = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    _store(reply, total, row, column, num_rows, m, ADDS)


@triton.jit
def multiply_digits(
    planes, weight, reply, num_rows, d, m, row_stride, plane_stride, column_stride,
    NUM_PLANES: tl.constexpr, BITS: tl.constexpr, ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Computes `multiply_planes` from float16 digits of BITS bits. The sum of a block, of BLOCK_K products, is at most
    2^(BITS - 1) · 128 · BLOCK_K. Callers choose BLOCK_K so that this is at most 2^24, up to which float32 holds every
    integer. Blocks are added in int32, which wraps."""
    first_row, first_column = _place(num_rows, m, BLOCK_M, BLOCK_N, GROUP_M)
    row, column = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    left = planes + (row % num_rows).to(tl.int64)[:, None] * row_stride + inner[None, :]
    right = weight + (column % m).to(tl.int64)[None, :] * column_stride + inner[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for index in range(NUM_PLANES):
        plane = left + tl.cast(plane_stride, tl.int64) * (NUM_PLANES - 1 - index)
        total = total << BITS
        for start in range(0, d, BLOCK_K):
            is_inside = inner < d - start
            a = tl.load(plane + start, mask=is_inside[None, :], other=0.0)
            b = tl.load(right + start, mask=is_inside[:, None], other=0).to(tl.float16)
            total += tl.dot(a, b, out_dtype=tl.float32).to(tl.int32)
    _store(reply, total, row, column, num_rows, m, ADDS)


@triton.jit
def multiply_few(
    rows, weight, reply, num_rows, d, m, row_stride, inner_stride, plane_stride, column_stride,
    NUM_PLANES: tl.constexpr, IS_SPLIT: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Adds the product of at most ROWS rows to `reply`, int32, shape (num_rows, m), contiguous.

    The limbs of all rows are stacked as rows of one product, so that the weight is read once. `rows` are int32 numbers,
    whose limbs are taken here, or with IS_SPLIT the planes of `split_limbs`, which is faster for more than a few rows.
    Each program takes every SPLITS-th block of the inner width and adds its part by atomic operations, which wrap. No
    sum leaves int32 for d below 2^17.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    stacked = tl.arange(0, 4 * ROWS)
    row, limb = stacked % ROWS, stacked // ROWS
    is_read = ((row < num_rows) & (limb < NUM_PLANES))[:, None]
    left = rows + row.to(tl.int64)[:, None] * row_stride + inner[None, :] * inner_stride
    if IS_SPLIT:
        left += limb.to(tl.int64)[:, None] * plane_stride
    right = weight + (column % m).to(tl.int64)[None, :] * column_stride + inner[:, None]
    sums = tl.zeros((4 * ROWS, BLOCK_N), dtype=tl.int32)
    for start in range(tl.program_id(1) * BLOCK_K, d, SPLITS * BLOCK_K):
        is_inside = inner < d - start
        z = tl.load(left + start * inner_stride, mask=is_read & is_inside[None, :], other=0)
        a = z if IS_SPLIT else (((z + 0x00808080) ^ 0x00808080) >> (8 * limb)[:, None]).to(tl.int8)
        b = tl.load(right + start, mask=is_inside[:, None], other=0)
        sums = tl.dot(a, b, sums, out_dtype=tl.int32)
    shifted = sums << (8 * limb)[:, None]
    total = tl.sum(tl.reshape(shifted, (4, ROWS, BLOCK_N)), axis=0)
    out = tl.arange(0, ROWS)
    to = reply + out[:, None] * m + column[None, :]
    tl.atomic_add(to, total, mask=(out < num_rows)[:, None] & (column < m)[None, :], sem="relaxed")


@triton.jit
def encode_rows(
    rows, alpha, encoded, scales, is_bad, d, row_stride, budget, smallest, HAS_ALPHA: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Encodes one row of float32 numbers: `coding.encode`. Sets `is_bad`, int32, to 1 if the row holds NaN or
    infinity."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    here = rows + row.to(tl.int64) * row_stride
    squares = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, d, BLOCK):
        x = tl.load(here + start + at, mask=start + at < d, other=0.0)
        if HAS_ALPHA:
            x = x * tl.load(alpha + start + at, mask=start + at < d, other=0.0)
        squares += x.to(tl.float64) * x.to(tl.float64)
    norm = tl.sqrt(tl.sum(squares, axis=0))
    is_finite = norm < float("inf")  # False for NaN too
    tl.atomic_or(is_bad, tl.where(is_finite, 0, 1), sem="relaxed")
    beta = tl.maximum(norm / budget, smallest)
    tl.store(scales + row, beta.to(tl.float32))
    inverse = (1.0 / beta).to(tl.float32)
    for start in range(0, d, BLOCK):
        x = tl.load(here + start + at, mask=start + at < d, other=0.0)
        if HAS_ALPHA:
            x = x * tl.load(alpha + start + at, mask=start + at < d, other=0.0)
        # Adding 1.5 · 2^52 and taking it off rounds a float64 to an integer, half to even.
        whole = ((x * inverse).to(tl.float64) + 6755399441055744.0) - 6755399441055744.0
        number = tl.where(is_finite, whole, 0.0).to(tl.int32)
        tl.store(encoded + row.to(tl.int64) * d + start + at, number, mask=start + at < d)


@triton.jit
def decode_rows(
    reply, effect, alpha, scales, out, m, reply_stride, effect_stride,
    HAS_EFFECT: tl.constexpr, HAS_ALPHA: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Decodes a block of one row: `coding.decode`. The difference of reply and effect wraps."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(reply + row * reply_stride + at, mask=at < m, other=0)
    if HAS_EFFECT:
        number -= tl.load(effect + row * effect_stride + at, mask=at < m, other=0)
    y = number.to(tl.float32)
    if HAS_ALPHA:
        y = y * tl.load(alpha + at, mask=at < m, other=0.0)
    tl.store(out + row * m + at, y * tl.load(scales + row), mask=at < m)
