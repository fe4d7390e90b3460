"""How the work of one operation is cut into pieces that threads take one after the other (wire/ring/threads.py).

The sizes are those at which another thread was measured to be worth waking, and the block sizes are those of kernels.c.
"""

from __future__ import annotations

import torch

_REGISTER_ROWS, _BLOCK_ROWS = 3, 48
_SHARED_ROWS = 2 * _BLOCK_ROWS
"""Rows from which threads share the rows; with fewer they share columns. Each thread packs what it multiplies, so a
piece of either must be large beside what it packs of the other."""
_SHARED_COLUMNS = 256
_SHARED_NUMBERS = 1 << 18
"""Numbers to code from which other threads help; one thread takes 0.2 ms for so many."""
_SHARED_WORK = 1 << 24
"""Multiplications from which other threads help: one takes 0.7 ms for so many, and waking one was measured to take 0.1
ms."""
_VNNI_SPEED = 4
"""How many times as much work must be there with VNNI. One thread takes 0.15 ms for 2^24 multiplications then; sharing
the widest products of 16 rows made all of a model take 1.2 times the processor time."""

Piece = tuple[int, int, int, int]
"""A piece of a product: first and last row, first and last column."""


def row_pieces(num_rows: int, columns: int) -> list[tuple[int, int]]:
    """Returns the pieces, each (first row, how many), that threads take one after the other."""
    num_pieces = 2 * torch.get_num_threads() if num_rows * columns >= _SHARED_NUMBERS else 1
    step = max(1, -(-num_rows // num_pieces))
    return [(start, min(step, num_rows - start)) for start in range(0, num_rows, step)]


def product_pieces(num_rows: int, d: int, m: int, with_vnni: bool = False) -> list[Piece]:
    """Returns the pieces that threads take: two for each thread, so that a core busy elsewhere does not delay the
    others."""
    num_pieces = 2 * torch.get_num_threads()
    if num_pieces <= 2 or num_rows * d * m < _SHARED_WORK * (_VNNI_SPEED if with_vnni else 1):
        return [(0, num_rows, 0, m)]
    if num_rows >= _SHARED_ROWS:
        step = _step(num_rows, num_pieces, _REGISTER_ROWS)
        return [(start, min(num_rows, start + step), 0, m) for start in range(0, num_rows, step)]
    step = _step(m, num_pieces, _SHARED_COLUMNS)
    return [(0, num_rows, start, min(m, start + step)) for start in range(0, m, step)]


def _step(length: int, num_pieces: int, block: int) -> int:
    return max(1, -(-length // (num_pieces * block))) * block
