"""This module sends ring numbers with fewer than 32 bits: it rounds them, packs them, and says how many bits are
enough.

A number of w bits stands for itself times 2^(32 − w), mod 2^32. So rows of any width are multiplied alike, mod 2^32,
the lowest 32 − w bits of each product are zero again, and the rest is exact. In memory all numbers are int32; only in
frames are they packed.

Guarantees: `pack` and `unpack` undo each other for rounded rows. `unpack` takes any bytes of the right length, but for
rows that do not end with zeros, which it refuses. How many bits are enough depends on the public norms of a layer
alone, and on no row.

Source: wire/SPEC.md, sections 3 and 5.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from wire.errors import InvalidTensor
from wire.ring import kernels
from wire.ring.buffers import unwritten, unwritten_tensor

FULL_BITS = 32
"""The bits of a ring number that is not shortened."""
REQUEST_BITS = (24, 26, 28, FULL_BITS)
"""The widths that rows of a request may have."""
SHORT_REPLY_BITS = 16
"""The width of a reply that is not exact."""
PACKED_EFFECT_BITS = 8 * kernels.EFFECT_BYTES
"""The bits of an effect's number that is packed. What `pack` makes of them is the high three bytes of each number."""
_SLICE_NUMBERS = 1 << 20
"""How many numbers are packed at a time without compiled kernels, at the cost of 64 bytes each."""


def enough_bits(features: int, weight_norm: float, tolerance: float) -> int:
    """Returns the smallest width of a request's numbers at which rounding is as good as unseen.

    Rounding to w bits moves each number by an error that is uniform in ±2^(31 − w), so that a product with a column of
    norm n errs by 2^(32 − w) · n / √12. Scales are such that the largest product is about 2^31, and a row that is not
    turned to the column has one of 2^31 / √d. The width is the smallest at which the former is at most τ of the latter.

    Args:
        features: d, how many numbers a row has.
        weight_norm: the largest norm of a column of the integer weight (of a row, backward), from the manifest.
        tolerance: τ, for example 1.25e-3.
    """
    for bits in REQUEST_BITS[:-1]:
        if 2.0 ** (FULL_BITS - bits) * math.sqrt(features) * weight_norm / (math.sqrt(12) * 2.0**31) <= tolerance:
            return bits
    return FULL_BITS


def row_bytes(cols: int, bits: int) -> int:
    """Returns how many bytes a row of `cols` numbers takes: its bits, and zero bits up to a whole byte."""
    return -(-cols * bits // 8)


def add_rounded(to: torch.Tensor, rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Adds rows to others in place, mod 2^32, and rounds the sums; see `rounded`. Returns `to`.

    Args:
        to, rows: int32, shape (num_rows, features), on one device.
        bits: how many upper bits of a sum are kept.
    """
    if bits == FULL_BITS:
        return to.add_(rows)
    if kernels.available() and to.is_cpu and to.is_contiguous() and rows.is_contiguous():
        kernels.add(to, rows, bits)
        return to
    return rounded(to.add_(rows), bits)


def rounded(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Rounds numbers in place to their upper `bits` bits, halves up, mod 2^32; the others become zero. Returns `rows`.

    Args:
        rows: int32, any shape and device.
    """
    if bits == FULL_BITS:
        return rows
    half = 1 << (FULL_BITS - 1 - bits)
    return rows.add_(half).bitwise_and_(-2 * half)


def pack(rows: torch.Tensor, bits: int, out: memoryview | None = None) -> memoryview:
    """Rounds rows and packs their upper bits, least significant first, row after row.

    Args:
        rows: int32, shape (num_rows, cols), CPU.
        bits: 16, or one of `REQUEST_BITS` below 32.
        out: memory for the result, of num_rows · `row_bytes` bytes; None to allocate it.

    Returns:
        The bytes.
    """
    num_rows, cols = rows.shape
    packed = unwritten(num_rows * row_bytes(cols, bits)) if out is None else out
    if kernels.available():
        kernels.pack(rows if kernels.codes(rows) else rows.contiguous(), bits, packed)
        return packed
    written = (
        np.frombuffer(packed, dtype=np.uint8).reshape(num_rows, -1) if packed.nbytes else np.empty((0, 0), np.uint8)
    )
    step = max(1, _SLICE_NUMBERS // max(1, cols))
    for start in range(0, num_rows if packed.nbytes else 0, step):
        part = rounded(rows[start : start + step].clone(memory_format=torch.contiguous_format), bits)
        numbers = (part.numpy().view(np.uint32) >> np.uint32(FULL_BITS - bits)).astype("<u4").view(np.uint8)
        each_bit = np.unpackbits(numbers.reshape(-1, cols, 4), axis=2, bitorder="little")
        written[start : start + step] = np.packbits(
            each_bit[:, :, :bits].reshape(part.shape[0], -1), axis=1, bitorder="little"
        )
    return packed


def unpack(data: memoryview, num_rows: int, cols: int, bits: int) -> torch.Tensor:
    """Undoes `pack`.

    Args:
        data: the bytes of all rows; callers must check how many they are.
        num_rows, cols: the shape of the rows.
        bits: 16, or one of `REQUEST_BITS` below 32.

    Returns:
        int32, shape (num_rows, cols), whose lowest 32 − `bits` bits are zero; memory of its own.

    Raises:
        InvalidTensor: a row does not end with zero bits.
    """
    is_fast = kernels.available()
    rows = kernels.unpack(data, bits, num_rows, cols) if is_fast else _unpack_slowly(data, num_rows, cols, bits)
    if rows is None:
        raise InvalidTensor(kernels.NOT_CLEAN)
    return rows


def _unpack_slowly(data: memoryview, num_rows: int, cols: int, bits: int) -> torch.Tensor | None:
    rows = unwritten_tensor(num_rows, cols, torch.int32)
    if not data.nbytes:
        return rows
    packed = np.frombuffer(data, dtype=np.uint8).reshape(num_rows, -1)
    step, is_clean = max(1, _SLICE_NUMBERS // cols), True
    for start in range(0, num_rows, step):
        each_bit = np.unpackbits(packed[start : start + step], axis=1, bitorder="little")
        is_clean = is_clean and not each_bit[:, cols * bits :].any()
        whole = np.zeros((each_bit.shape[0], cols, FULL_BITS), np.uint8)
        whole[:, :, FULL_BITS - bits :] = each_bit[:, : cols * bits].reshape(-1, cols, bits)
        numbers = np.packbits(whole, axis=2, bitorder="little").view("<u4")[:, :, 0]
        rows[start : start + step] = torch.from_numpy(numbers.astype(np.uint32).view(np.int32))
    return rows if is_clean else None


def pack_row(numbers: memoryview, cols: int, bits: int, out: memoryview) -> None:
    """Does what `pack` does, for one row in memory that is no tensor's.

    Args:
        numbers: the row's int32 numbers, writable.
        cols: how many they are.
        bits: 16, or one of `REQUEST_BITS` below 32.
        out: memory for the result.

    Raises:
        InvalidTensor: the numbers are more or fewer.
    """
    if not cols:
        return
    if numbers.nbytes != cols * kernels.NUMBER_BYTES:
        raise InvalidTensor(f"expected the memory of {cols} numbers, got {numbers.nbytes} bytes")
    if kernels.available():
        kernels.pack_row(numbers, bits, out)
    else:
        pack(torch.frombuffer(numbers, dtype=torch.int32).view(1, cols), bits, out)


def unpack_row(data: memoryview, cols: int, bits: int) -> memoryview:
    """Does what `unpack` does, for one row, and returns the bytes of its int32 numbers."""
    if kernels.available() and cols and not data.readonly:
        numbers = memoryview(bytearray(cols * kernels.NUMBER_BYTES))
        if not kernels.unpack_row(data, bits, numbers):
            raise InvalidTensor(kernels.NOT_CLEAN)
        return numbers
    return unpack(data, 1, cols, bits).numpy().data.cast("B") if cols else memoryview(b"")


def pack_effect(effect: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Keeps the high three bytes of each number of an effect, which loses nothing of multiples of 256. Other numbers
    are rounded to such, halves up.

    Args:
        effect: int32, shape (num_rows, m), CPU.
        packed: uint8, shape (num_rows, 3 · m), CPU, contiguous; written.

    Returns:
        `packed`.
    """
    pack(effect, PACKED_EFFECT_BITS, memoryview(packed.view(-1).numpy()))  # type: ignore[arg-type]
    return packed


def unpacked_effect(packed: torch.Tensor) -> torch.Tensor:
    """Undoes `pack_effect`.

    Args:
        packed: uint8, shape (num_rows, 3 · m), any device and strides.

    Returns:
        int32, shape (num_rows, m), whose low bytes are zero.
    """
    num_rows, num_bytes = packed.shape
    cols = num_bytes // kernels.EFFECT_BYTES
    made = torch.zeros(num_rows, cols, 4, dtype=torch.uint8, device=packed.device)
    made[:, :, 4 - kernels.EFFECT_BYTES :] = packed.unflatten(1, (cols, kernels.EFFECT_BYTES))
    return made.view(torch.int32).view(num_rows, cols)
