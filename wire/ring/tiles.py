"""This module cuts the work of products, and of encoding and decoding, into tiles, which threads take one after another
(runtime/threads.py).

`_SHARED_NUMBERS` and `_SHARED_WORK` are the smallest sizes for which waking another thread saved time in measurements.
`_REGISTER_ROWS` and `_BLOCK_ROWS` are the block sizes of wire/ring/kernels.c.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

_REGISTER_ROWS, _BLOCK_ROWS = 3, 48
_SHARED_ROWS = 2 * _BLOCK_ROWS
"""The number of rows from which a product is cut by rows; a product of fewer rows is cut by columns. A thread packs
(copies) both operands of its tile. If the product is cut by rows, every thread packs the whole weight, which pays only
if its tile has many rows."""
_SHARED_COLUMNS = 256
_SHARED_NUMBERS = 1 << 18
"""If there are at least this many numbers to encode or decode, other threads help. One thread takes 0.2 ms for this
count."""
_SHARED_WORK = 1 << 24
"""If there are at least this many multiplications, other threads help. One thread takes 0.7 ms for this count, and
waking a thread was measured to take 0.1 ms."""
_VNNI_SPEED = 4
"""The factor by which `_SHARED_WORK` is larger if products use VNNI, with which one thread takes 0.15 ms for 2^24
multiplications. Without the factor, the widest products of 16 rows were shared, and all products of a model took 1.2
times the processor time."""

Tile = tuple[int, int, int, int]
"""A part of a product: (start row, end row, start column, end column). The ends are not included."""
RowsAndReply = tuple[torch.Tensor, torch.Tensor]
"""A pair of some rows and the memory for their product."""


def row_tiles(num_rows: int, columns: int) -> list[tuple[int, int]]:
    """Cuts the encoding or decoding of `num_rows` rows of `columns` numbers into tiles, which threads take one after
    another. Returns each tile as (first row, number of rows)."""
    num_tiles = 2 * torch.get_num_threads() if num_rows * columns >= _SHARED_NUMBERS else 1
    step = max(1, -(-num_rows // num_tiles))
    return [(start, min(step, num_rows - start)) for start in range(0, num_rows, step)]


def product_tiles(num_rows: int, d: int, m: int, with_vnni: bool = False) -> list[Tile]:
    """Cuts a product into tiles, which threads take one after another. A product that is worth sharing gives
    about two tiles for each thread, so that a core that is busy with other work does not delay it; any other product
    is one tile.

    Args:
        num_rows: the number of rows that are multiplied.
        d, m: the shape of the weight.
        with_vnni: whether the product uses VNNI, the AVX-512 instructions for int8 products.
    """
    num_tiles = 2 * torch.get_num_threads()
    if num_tiles <= 2 or num_rows * d * m < _SHARED_WORK * (_VNNI_SPEED if with_vnni else 1):
        return [(0, num_rows, 0, m)]
    if num_rows >= _SHARED_ROWS:
        step = _step(num_rows, num_tiles, _REGISTER_ROWS)
        return [(start, min(num_rows, start + step), 0, m) for start in range(0, num_rows, step)]
    step = _step(m, num_tiles, _SHARED_COLUMNS)
    return [(0, num_rows, start, min(m, start + step)) for start in range(0, m, step)]


def _step(length: int, num_tiles: int, block: int) -> int:
    return max(1, -(-length // (num_tiles * block))) * block


def row_blocks(
    parts: Sequence[torch.Tensor], replies: Sequence[torch.Tensor], step: int
) -> Iterator[list[RowsAndReply]]:
    """Yields blocks of `step` rows (the last may be smaller) as pairs of rows and memory for their product. A block may
    span several matrices."""
    block: list[RowsAndReply] = []
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
