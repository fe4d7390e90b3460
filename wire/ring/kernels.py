"""This module loads the kernels that are compiled when the package is built. They compute products, and encode
and decode rows, on x86-64 processors with AVX2, and use VNNI if the processor has it.

Guarantees: products are exact mod 2^32 for every number, shape and memory order. Rows are encoded and decoded as by
torch's operations, except that a row's scale β, and with it the encoded row, may differ in its last bit, since
squares are summed in another order.
If the library was not built, or the processor lacks AVX2, `available()` returns False and callers must call nothing
else of this module. wire/ring/product.py and wire/ring/coding.py then use torch.

This module checks all arguments of the compiled code, which checks nothing itself.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.compiled import COUNT, INT, POINTER, Signature, load
from runtime.threads import share
from wire.errors import InvalidTensor
from wire.ring.buffers import unwritten_tensor
from wire.ring.tiles import Tile, product_tiles, row_tiles

LIBRARY = Path(__file__).with_name("_kernels.so")

_VERSION = 9
"""The version of the functions' signatures, as in kernels.c. A library with another version is not used."""
_SKIPPING = 2
"""As in kernels.h."""
NUMBER_BYTES = 4
"""The bytes of a number in memory."""
EFFECT_BYTES = 3
"""The bytes of a number of an effect that is packed: the high three of four, little-endian. The low byte is zero."""
NOT_CLEAN = "expected zero bits at the end of each packed row"
_BYTE: Any = ctypes.c_char
_FLOAT: Any = ctypes.c_float

_local = threading.local()


_FUNCTIONS: dict[str, Signature] = {
    # d, the inner width
    "veilbase_scratch_bytes": ([COUNT], COUNT),
    "veilbase_has_vnni": ([], INT),
    "veilbase_most_few_rows": ([], COUNT),
    # rows, replies, rows from and to, weight, its strides, d, columns from and to, scratch, whether by VNNI
    "veilbase_product": ([*[POINTER] * 2, *[COUNT] * 2, POINTER, *[COUNT] * 5, POINTER, INT], None),
    # rows, their stride, replies, how many, weight, its strides, d, m, scratch, whether by VNNI
    "veilbase_few_product": ([POINTER, COUNT, POINTER, COUNT, POINTER, *[COUNT] * 4, POINTER, INT], None),
    # row, its bits, reply, its bits, numbers, weight, its strides, d, m, scratch, whether by VNNI
    "veilbase_packed_row_product": (
        [*[POINTER, COUNT] * 2, *[POINTER] * 2, *[COUNT] * 4, POINTER, INT],
        COUNT,
    ),
    # rows, stride, alpha, how many, d, budget, smallest, out, betas
    "veilbase_encode": ([POINTER, COUNT, POINTER, *[COUNT] * 2, *[ctypes.c_double] * 2, *[POINTER] * 2], COUNT),
    # to, from, how many, bits
    "veilbase_add": ([POINTER, POINTER, *[COUNT] * 2], None),
    # to, from, how many, bits, packed
    "veilbase_add_and_pack": ([POINTER, POINTER, *[COUNT] * 2, POINTER], None),
    # rows, stride, how many, d, bits, packed
    "veilbase_pack": ([POINTER, *[COUNT] * 4, POINTER], None),
    # packed, how many, d, bits, rows
    "veilbase_unpack": ([POINTER, *[COUNT] * 3, POINTER], COUNT),
    # reply, stride, effect, its bytes a row and a number, alpha, betas, how many, m, out, stride
    "veilbase_decode": ([*[POINTER, COUNT] * 2, COUNT, *[POINTER] * 2, *[COUNT] * 2, POINTER, COUNT], None),
}
"""The compiled functions, with the types of their arguments and results."""


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load(LIBRARY, ("veilbase_kernels_version", _VERSION), "veilbase_usable", _FUNCTIONS)


def available() -> bool:
    """Tells whether this machine can use the compiled kernels; returns False if VEILBASE_KERNELS is `none`."""
    return _library() is not None


@functools.cache
def has_vnni() -> bool:
    """Tells whether products use AVX-512 with VNNI; returns False if VEILBASE_KERNELS is `avx2`."""
    if os.environ.get("VEILBASE_KERNELS", "") == "avx2":
        return False
    library = _library()
    return library is not None and bool(library.veilbase_has_vnni())


def suits(weight: torch.Tensor) -> bool:
    """Tells whether the kernels can read a weight: it is on the CPU and its rows or columns are contiguous."""
    return weight.is_cpu and 1 in weight.stride()


def products(
    parts: Sequence[torch.Tensor], weight: torch.Tensor, replies: Sequence[torch.Tensor], are_secret: bool = False
) -> None:
    """Multiplies each matrix of rows by the weight, mod 2^32, and writes the products to `replies`. With VNNI, many
    rows of 24 bits take less time than rows of 32.

    Args:
        parts: one matrix or more, each int32, shape (its number of rows, d), CPU, any strides.
        weight: int8, shape (d, m), for which `suits` returns True.
        replies: memory for each product, int32, shape (number of rows, m), CPU, contiguous, which overlaps no other
            argument.
        are_secret: whether the time must not depend on the rows, so that it is always that of 32 bits.

    Raises:
        InvalidTensor: an argument is not as described.
    """
    library = _library()
    if library is None or not suits(weight) or weight.dtype != torch.int8:
        raise InvalidTensor("no compiled kernel for this weight")
    d, m = weight.shape
    if len(parts) != len(replies):
        raise InvalidTensor(f"expected memory for {len(parts)} replies, got {len(replies)}")
    for part, reply in zip(parts, replies, strict=True):
        _check(part, reply, d, m)
    parts = [part if part.is_contiguous() or part.stride(1) == 1 or d <= 1 else part.contiguous() for part in parts]
    row_stride, column_stride = weight.stride()
    if column_stride != 1:
        row_stride = 1  # A dimension of size 1 may have any stride.
    address, scratch_bytes = weight.data_ptr(), _scratch_bytes(d)
    tiles = product_tiles(sum(part.shape[0] for part in parts), d, m, has_vnni())
    if len(parts) == 1 and len(tiles) == 1 and parts[0].shape[0] <= _most_few_rows():
        # In decode a product of a few rows is a few dozen microseconds, and arrays of pointers would add ten.
        library.veilbase_few_product(
            parts[0].data_ptr(), parts[0].stride(0), replies[0].data_ptr(), parts[0].shape[0], address, row_stride,
            column_stride, d, m, _scratch(scratch_bytes), has_vnni(),
        )  # fmt: skip
        return
    with_vnni = _SKIPPING if has_vnni() and not are_secret else has_vnni()
    starts, ends = _pointers(parts), _pointers(replies)
    written = parts, weight, replies

    def work(tiles: Iterator[Tile], _held: object = written) -> None:
        scratch = _scratch(scratch_bytes)
        for first_row, last_row, first_column, last_column in tiles:
            library.veilbase_product(
                starts.ctypes.data, ends.ctypes.data, first_row, last_row, address, row_stride, column_stride, d,
                first_column, last_column, scratch, with_vnni,
            )  # fmt: skip

    share(work, tiles)


class OneRow:
    """Multiplies one row at a time by a weight. The constructor checks the weight once for all.

    A decode step computes a hundred products, each in a few dozen microseconds. Rows are passed as bytes, since making
    tensors costs time.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        """Checks and keeps `weight`: int8, shape (d, m), not empty, for which `suits` returns True.

        Raises:
            InvalidTensor: the weight is not as described, or `available()` is False.
        """
        library = _library()
        if (
            library is None
            or weight.dtype != torch.int8
            or weight.dim() != 2
            or not suits(weight)
            or not weight.numel()
        ):
            raise InvalidTensor("no compiled kernel for this weight")
        row_stride, column_stride = weight.stride()
        if column_stride != 1:
            row_stride = 1
        d, m = weight.shape
        self._product, self._weight = library.veilbase_product, weight  # The weight is kept since its memory is read.
        self._row_bytes, self._reply_bytes, self._scratch_bytes = 4 * d, 4 * m, _scratch_bytes(d)
        self._described = tuple(map(COUNT, (row_stride, column_stride, d, 0, m)))
        self._address, self._has_vnni = POINTER(weight.data_ptr()), has_vnni()
        self._packed_product = library.veilbase_packed_row_product
        self._shape = tuple(map(COUNT, (row_stride, column_stride, d, m)))
        self._d, self._m = d, m

    def multiply(self, row: memoryview, reply: memoryview) -> None:
        """Computes the product of one row and the weight, mod 2^32, and writes it to `reply`.

        Args:
            row: d int32 numbers in this machine's byte order, as bytes at an address that is a multiple of 4. The
                memory must be writable, since ctypes demands it, but nothing is written to it.
            reply: memory of the same kind for the m int32 numbers of the product.

        Raises:
            InvalidTensor: an argument has another size or alignment, or is read-only.
        """
        if row.nbytes != self._row_bytes or reply.nbytes != self._reply_bytes or row.readonly or reply.readonly:
            raise InvalidTensor("bytes that are no row of this weight")
        # What `from_buffer` returns keeps the memory alive.
        start, end = _BYTE.from_buffer(row), _BYTE.from_buffer(reply)
        numbers, written = ctypes.addressof(start), ctypes.addressof(end)
        if (numbers | written) % 4:
            raise InvalidTensor("bytes that do not lie as numbers do")
        self._product(
            ctypes.byref(POINTER(numbers)), ctypes.byref(POINTER(written)), 0, 1, self._address, *self._described,
            _scratch(self._scratch_bytes), self._has_vnni,
        )  # fmt: skip

    def multiply_packed(self, row: memoryview, bits: int, reply: memoryview, reply_bits: int) -> None:
        """Does what `multiply` does, for a row and a reply whose numbers are packed; see `wire.ring.widths.pack`.

        Args:
            row: ⌈d · bits / 8⌉ bytes at any address. The memory must be writable, since ctypes demands it, but nothing
                is written to it.
            reply: writable memory of ⌈m · reply_bits / 8⌉ bytes.
            bits, reply_bits: even numbers, 16 to 28, or 32.

        Raises:
            InvalidTensor: an argument is not as described, or the row does not end with zero bits.
        """
        sizes = _packed_row_bytes(self._d, bits), _packed_row_bytes(self._m, reply_bits)
        if (row.nbytes, reply.nbytes) != sizes or 30 in (bits, reply_bits):
            raise InvalidTensor("bytes that are no row of this weight")
        start, end = _address(row), _address(reply)
        scratch = _scratch(self._scratch_bytes + 4 * (self._d + self._m))
        if self._packed_product(
            start, bits, end, reply_bits, scratch + self._scratch_bytes, self._address, *self._shape, scratch,
            self._has_vnni,
        ):  # fmt: skip
            raise InvalidTensor(NOT_CLEAN)


def codes(matrix: torch.Tensor) -> bool:
    """Tells whether the kernels can encode or decode a matrix: 32-bit numbers, on the CPU, each row contiguous."""
    if not matrix.is_cpu or matrix.itemsize != 4 or matrix.dim() != 2:
        return False
    return matrix.is_contiguous() or matrix.stride(1) == 1 or matrix.shape[1] == 1  # The first is cheaper to ask for.


def subtracts(effect: torch.Tensor) -> bool:
    """Tells whether `decode` can read an effect: int32 or packed, on the CPU, each row contiguous."""
    return codes(effect) or (
        effect.dtype == torch.uint8
        and effect.is_cpu
        and effect.dim() == 2
        and (effect.is_contiguous() or effect.stride(1) == 1)
    )


def _effect_bytes(effect: torch.Tensor, num_rows: int, m: int) -> int:
    """Returns how many bytes a number of an effect has, 4 or `EFFECT_BYTES`; 0 if it is no effect of this shape."""
    if effect.dtype == torch.int32 and effect.shape == (num_rows, m):
        return 4
    return EFFECT_BYTES if effect.dtype == torch.uint8 and effect.shape == (num_rows, EFFECT_BYTES * m) else 0


def encode(
    rows: torch.Tensor, alpha: torch.Tensor | None, budget: float, smallest: float, encoded: torch.Tensor
) -> torch.Tensor | None:
    """Scales rows and rounds them to int32; see `wire.ring.coding.encode`. The checks are few and cheap.

    Args:
        rows: float32, shape (num_rows, d), for which `codes` returns True.
        alpha: float32, shape (d,), contiguous, CPU; the rows are first multiplied by it. None stands for ones.
        budget: the largest 2-norm that a scaled row may have before it is rounded; above 0 and below 2^31.
        smallest: the smallest allowed scale β.
        encoded: the memory for the encoded rows, int32, shape (num_rows, d), contiguous, CPU.

    Returns:
        β, the scale of each row, float32, shape (num_rows, 1); None if a row holds NaN or infinity.

    Raises:
        InvalidTensor: an argument is not as described.
    """
    library = _library()
    if library is None or rows.dtype != torch.float32 or not codes(rows) or not 0 < budget < 1 << 31:
        raise InvalidTensor("no compiled kernel for these rows")
    num_rows, d = rows.shape
    _check_written(encoded, num_rows, d, torch.int32)
    _check_alpha(alpha, d)
    betas = torch.empty(num_rows, 1, dtype=torch.float32, device="cpu")  # This ignores the user's defaults.
    start, to, scale = rows.data_ptr(), encoded.data_ptr(), betas.data_ptr()
    factors = None if alpha is None else alpha.data_ptr()
    if num_rows == 1:
        done = library.veilbase_encode(start, d, factors, 1, d, budget, smallest, to, scale)
        return betas if done == 1 else None
    stride = rows.stride(0)
    whole: list[bool] = []
    written = rows, alpha, encoded, betas

    def work(tiles: Iterator[tuple[int, int]], _held: object = written) -> None:
        for first, count in tiles:
            done = library.veilbase_encode(
                start + 4 * stride * first, stride, factors, count, d, budget, smallest, to + 4 * d * first,
                scale + 4 * first,
            )  # fmt: skip
            if done != count:
                return
            whole.append(True)

    tiles = row_tiles(num_rows, d)
    share(work, tiles)
    return betas if len(whole) == len(tiles) else None


def decode(
    reply: torch.Tensor, effect: torch.Tensor | None, betas: torch.Tensor, alpha: torch.Tensor | None
) -> torch.Tensor:
    """Subtracts the mask's effect from the rows of a reply and scales them; see `wire.ring.coding.decode`.

    Args:
        reply: int32, shape (num_rows, m), for which `codes` returns True.
        effect: what is subtracted mod 2^32, with the dtype and shape of `reply`, or packed: uint8, shape (num_rows,
            3 · m); None to subtract nothing.
        betas: the scales that `encode` returned, float32, shape (num_rows, 1), contiguous, CPU.
        alpha: the scales of the weight's columns, float32, shape (m,), contiguous, CPU; None stands for ones.

    Returns:
        The real product, float32, shape (num_rows, m).

    Raises:
        InvalidTensor: an argument is not as described.
    """
    library = _library()
    if library is None or reply.dtype != torch.int32 or not codes(reply):
        raise InvalidTensor("no compiled kernel for this reply")
    num_rows, m = reply.shape
    number_bytes = 0 if effect is None else _effect_bytes(effect, num_rows, m)
    if effect is not None and (number_bytes == 0 or not subtracts(effect)):
        raise InvalidTensor("no compiled kernel for this effect")
    _check_written(betas, num_rows, 1, torch.float32)
    _check_alpha(alpha, m)
    made = torch.empty(num_rows, m, dtype=torch.float32, device="cpu")
    start, to, scale = reply.data_ptr(), made.data_ptr(), betas.data_ptr()
    factors = None if alpha is None else alpha.data_ptr()
    taken = None if effect is None else effect.data_ptr()
    if num_rows == 1:
        library.veilbase_decode(start, m, taken, 0, number_bytes, factors, scale, 1, m, to, m)
        return made
    stride, taken_row = reply.stride(0), 0 if effect is None else effect.stride(0) * effect.itemsize
    written = reply, effect, betas, alpha, made

    def work(tiles: Iterator[tuple[int, int]], _held: object = written) -> None:
        for first, count in tiles:
            library.veilbase_decode(
                start + 4 * stride * first, stride, None if taken is None else taken + taken_row * first, taken_row,
                number_bytes, factors, scale + 4 * first, count, m, to + 4 * m * first, m,
            )  # fmt: skip

    share(work, row_tiles(num_rows, m))
    return made


def pack(rows: torch.Tensor, bits: int, packed: memoryview) -> None:
    """Rounds rows and packs them; see `wire.ring.widths.pack`.

    Args:
        rows: int32, shape (num_rows, d), for which `codes` returns True.
        bits: an even number, 16 to 28.
        packed: writable memory of num_rows rows of ⌈d · bits / 8⌉ bytes.

    Raises:
        InvalidTensor: an argument is not as described.
    """
    library = _library()
    if library is None or rows.dtype != torch.int32 or not codes(rows):
        raise InvalidTensor("no compiled kernel for these rows")
    num_rows, d = rows.shape
    row_bytes = _packed_row_bytes(d, bits)
    if packed.nbytes != num_rows * row_bytes or packed.readonly:
        raise InvalidTensor("memory for packed rows has another size than the rows ask for")
    if not packed.nbytes:
        return
    start, stride = rows.data_ptr(), rows.stride(0)
    held = _BYTE.from_buffer(packed)
    to = ctypes.addressof(held)
    if num_rows == 1:
        library.veilbase_pack(start, stride, 1, d, bits, to)
        return

    def work(tiles: Iterator[tuple[int, int]], _held: object = (rows, held)) -> None:
        for first, count in tiles:
            library.veilbase_pack(start + 4 * stride * first, stride, count, d, bits, to + row_bytes * first)

    share(work, row_tiles(num_rows, d))


def unpack(packed: memoryview, bits: int, num_rows: int, d: int) -> torch.Tensor | None:
    """Undoes `pack`; see `wire.ring.widths.unpack`.

    Args:
        packed: num_rows rows of ⌈d · bits / 8⌉ bytes.
        bits: an even number, 16 to 28.
        num_rows, d: the shape of the rows.

    Returns:
        The numbers, int32, shape (num_rows, d); None if a row does not end with zero bits.

    Raises:
        InvalidTensor: an argument is not as described.
    """
    library, row_bytes = _library(), _packed_row_bytes(d, bits)
    if library is None or packed.nbytes != num_rows * row_bytes or not packed.c_contiguous:
        raise InvalidTensor("packed rows have another size than their shape asks for")
    rows = unwritten_tensor(num_rows, d, torch.int32)
    if not packed.nbytes:
        return rows
    to = rows.data_ptr()
    if num_rows == 1 and not packed.readonly:
        ends = library.veilbase_unpack(ctypes.byref(_BYTE.from_buffer(packed)), 1, d, bits, to)
        return None if ends else rows
    held = np.frombuffer(packed, dtype=np.uint8)  # This takes memory that cannot be written to as well.
    start = held.ctypes.data
    found: list[int] = []

    def work(tiles: Iterator[tuple[int, int]], _held: object = (rows, held)) -> None:
        for first, count in tiles:
            found.append(library.veilbase_unpack(start + row_bytes * first, count, d, bits, to + 4 * d * first))

    share(work, row_tiles(num_rows, d))
    return None if any(found) else rows


def pack_row(numbers: memoryview, bits: int, packed: memoryview) -> None:
    """Does what `pack` does, for one row in memory that is no tensor's, in a third of the time.

    Args:
        numbers: writable memory of int32 numbers, contiguous.
        bits: an even number, 16 to 28.
        packed: writable memory of ⌈d · bits / 8⌉ bytes for d numbers.

    Raises:
        InvalidTensor: an argument is not as described.
    """
    library, d = _for_row(numbers, bits, packed)
    start, to = _address(numbers), _address(packed)
    library.veilbase_pack(start, d, 1, d, bits, to)


def unpack_row(packed: memoryview, bits: int, numbers: memoryview) -> bool:
    """Undoes `pack_row`.

    Args:
        packed: writable memory of ⌈d · bits / 8⌉ bytes.
        bits: an even number, 16 to 28.
        numbers: writable memory for d int32 numbers, contiguous.

    Returns:
        Whether all bits that end the row are zero.

    Raises:
        InvalidTensor: an argument is not as described.
    """
    library, d = _for_row(numbers, bits, packed)
    start, to = _address(packed), _address(numbers)
    return int(library.veilbase_unpack(start, 1, d, bits, to)) == 0


def _for_row(numbers: memoryview, bits: int, packed: memoryview) -> tuple[ctypes.CDLL, int]:
    """Returns the library, and how many numbers a row has whose memory and packed memory these are."""
    library, d = _library(), numbers.nbytes // NUMBER_BYTES
    if library is None or not d or packed.nbytes != _packed_row_bytes(d, bits) or numbers.nbytes % NUMBER_BYTES:
        raise InvalidTensor("no compiled kernel for this row")
    return library, d


def _address(memory: memoryview) -> Any:
    """Returns a reference to the first byte of memory, for a compiled function. Raises InvalidTensor if the memory is
    not writable or not contiguous, which ctypes refuses."""
    try:
        return ctypes.byref(_BYTE.from_buffer(memory))
    except (TypeError, ValueError):
        raise InvalidTensor("no compiled kernel for this memory") from None


def add(to: torch.Tensor, rows: torch.Tensor, bits: int) -> None:
    """Adds rows to others, mod 2^32, and rounds the sums to their upper `bits` bits.

    Args:
        to, rows: int32, of one shape, CPU, contiguous; `to` is written.
        bits: an even number, 16 to 32.

    Raises:
        InvalidTensor: an argument is not as described.
    """
    library = _library()
    if library is None or rows.dtype != torch.int32 or rows.dim() != 2 or not (rows.is_cpu and rows.is_contiguous()):
        raise InvalidTensor("no compiled kernel for these rows")
    num_rows, d = rows.shape
    _check_written(to, num_rows, d, torch.int32)
    _packed_row_bytes(d, bits)
    start, end = to.data_ptr(), rows.data_ptr()

    def work(tiles: Iterator[tuple[int, int]], _held: object = (to, rows)) -> None:
        for first, count in tiles:
            library.veilbase_add(start + 4 * d * first, end + 4 * d * first, count * d, bits)

    share(work, row_tiles(num_rows, d))


def _packed_row_bytes(d: int, bits: int) -> int:
    if not 16 <= bits <= 32 or bits % 2:
        raise InvalidTensor(f"expected an even number of bits, 16 to 32, got {bits}")
    return -(-d * bits // 8)


class RowCodec:
    """Encodes and decodes one row at a time. The constructor checks the constants, so calls need not do so."""

    def __init__(
        self,
        request_alpha: torch.Tensor | None,
        reply_alpha: torch.Tensor | None,
        d: int,
        m: int,
        budget: float,
        smallest: float,
    ) -> None:
        """Checks and keeps the constants of `encode` and `decode`.

        Args:
            request_alpha, reply_alpha: the `alpha` of the functions `encode` and `decode`.
            d, m: how many numbers a request row and a reply row have.
            budget, smallest: see the function `encode`.

        Raises:
            InvalidTensor: a number or scale is out of range or of another type, or `available()` is False.
        """
        library = _library()
        if library is None or not 0 < budget < 1 << 31 or d <= 0 or m <= 0:
            raise InvalidTensor("no compiled kernel for these rows")
        _check_alpha(request_alpha, d)
        _check_alpha(reply_alpha, m)
        self._alphas = request_alpha, reply_alpha  # These tensors are kept, since their memory is read later.
        self._factors, self._reply_factors = (None if a is None else POINTER(a.data_ptr()) for a in self._alphas)
        self._encode, self._add, self._decode = library.veilbase_encode, library.veilbase_add, library.veilbase_decode
        self._add_and_pack = library.veilbase_add_and_pack
        self._d, self._m, self._one = COUNT(d), COUNT(m), COUNT(1)
        self._budget, self._smallest = ctypes.c_double(budget), ctypes.c_double(smallest)
        self._shape, self._reply_shape = (1, d), (1, m)

    def encode(self, row: torch.Tensor, out: memoryview) -> Any:
        """Scales a row and rounds it to int32.

        Args:
            row: float32, shape (1, d), contiguous, CPU.
            out: writable memory of 4·d bytes, to which the encoded row is written.

        Returns:
            β, the row's scale, as a ctypes object for `decode`; None if the row holds NaN or infinity.

        Raises:
            InvalidTensor: an argument is not as described.
        """
        if row.dtype != torch.float32 or row.shape != self._shape or not row.is_contiguous() or not row.is_cpu:
            raise InvalidTensor("no compiled kernel for this row")
        beta, written = _FLOAT(), self._numbers(out)
        done = self._encode(
            row.data_ptr(), self._d, self._factors, self._one, self._d, self._budget, self._smallest,
            ctypes.byref(written), ctypes.byref(beta),
        )  # fmt: skip
        return beta if done == 1 else None

    def add(self, mask: torch.Tensor, out: memoryview, bits: int = 32, packed: memoryview | None = None) -> None:
        """Adds a row of a mask to an encoded row, mod 2^32, and rounds the sum to its upper bits.

        Args:
            mask: int32, shape (1, d), contiguous, CPU.
            out: the memory that `encode` wrote to; it receives the sum.
            bits: how many bits of each number are kept; the others become zero.
            packed: writable memory of ⌈d · bits / 8⌉ bytes, which receives the packed sum, for fewer bits than 32;
                None to pack nothing.

        Raises:
            InvalidTensor: an argument is not as described.
        """
        if mask.dtype != torch.int32 or mask.shape != self._shape or not mask.is_contiguous() or not mask.is_cpu:
            raise InvalidTensor("no compiled kernel for this mask")
        numbers = ctypes.byref(self._numbers(out))
        if packed is None:
            self._add(numbers, mask.data_ptr(), self._d, bits)
            return
        if packed.nbytes != _packed_row_bytes(self._shape[1], bits) or not bits <= 28:
            raise InvalidTensor("memory for a packed row has another size than the row asks for")
        self._add_and_pack(numbers, mask.data_ptr(), self._d, bits, _address(packed))

    def decode(self, reply: torch.Tensor, beta: Any, effect: torch.Tensor | None = None) -> torch.Tensor:
        """Subtracts the mask's effect from a reply row and returns the real product.

        Args:
            reply: int32, shape (1, m), contiguous, CPU.
            effect: int32, shape (1, m), or packed: uint8, shape (1, 3 · m); contiguous, CPU; None subtracts nothing.
            beta: the β that `encode` returned.

        Returns:
            float32, shape (1, m).

        Raises:
            InvalidTensor: an argument is not as described.
        """
        is_right = reply.dtype == torch.int32 and reply.shape == self._reply_shape
        for each in (reply,) if effect is None else (reply, effect):
            is_right = is_right and each.is_contiguous() and each.is_cpu
        number_bytes = 0 if effect is None else _effect_bytes(effect, *self._reply_shape)
        if not is_right or (effect is not None and number_bytes == 0):
            raise InvalidTensor("no compiled kernel for this reply")
        made = torch.empty(self._reply_shape, dtype=torch.float32, device="cpu")
        self._decode(
            reply.data_ptr(), self._m, None if effect is None else effect.data_ptr(), 0, number_bytes,
            self._reply_factors, ctypes.byref(beta), self._one, self._m, made.data_ptr(), self._m,
        )  # fmt: skip
        return made

    def _numbers(self, out: memoryview) -> Any:
        """Returns a ctypes object at the address of `out`, whose memory the object keeps alive."""
        if out.nbytes != 4 * self._shape[1] or out.readonly:
            raise InvalidTensor("memory for a coded row has another size than the row asks for")
        return _BYTE.from_buffer(out)


def _check_written(matrix: torch.Tensor, num_rows: int, columns: int, dtype: torch.dtype) -> None:
    is_whole = matrix.is_cpu and matrix.is_contiguous()
    if matrix.dtype != dtype or matrix.shape != (num_rows, columns) or not is_whole:
        raise InvalidTensor("memory for coded rows has another shape, type or order than the rows ask for")


def _check_alpha(alpha: torch.Tensor | None, columns: int) -> None:
    if alpha is None:
        return
    is_whole = alpha.is_cpu and alpha.is_contiguous()
    if alpha.dtype != torch.float32 or alpha.shape != (columns,) or not is_whole:
        raise InvalidTensor(f"expected {columns} float32 scales on the CPU, got {alpha.dtype} of {alpha.numel()}")


def _check(part: torch.Tensor, reply: torch.Tensor, d: int, m: int) -> None:
    if part.dtype != torch.int32 or not part.is_cpu or part.dim() != 2 or part.shape[1] != d:
        raise InvalidTensor(f"expected int32 rows of {d} columns on the CPU, got {part.dtype} of {tuple(part.shape)}")
    _check_written(reply, part.shape[0], m, torch.int32)


def _pointers(matrices: Sequence[torch.Tensor]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Returns the memory address of each row of each matrix."""
    found = [
        matrix.data_ptr() + np.arange(matrix.shape[0], dtype=np.int64) * (matrix.stride(0) * matrix.itemsize)
        for matrix in matrices
    ]
    return found[0] if len(found) == 1 else np.concatenate(found)


@functools.cache
def _scratch_bytes(d: int) -> int:
    library = _library()
    return 0 if library is None else int(library.veilbase_scratch_bytes(d))


@functools.cache
def _most_few_rows() -> int:
    library = _library()
    return 0 if library is None else int(library.veilbase_most_few_rows())


def _scratch(num_bytes: int) -> int:
    """Returns the address of this thread's scratch memory, kept between calls since fresh pages cost time."""
    kept: tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], int] | None = getattr(_local, "scratch", None)
    if kept is None or kept[0].size < num_bytes:
        made = np.empty(num_bytes, dtype=np.uint8)
        kept = _local.scratch = made, made.ctypes.data  # Both are kept, since an address does not keep memory alive.
    return kept[1]
