"""This module cuts the work of one operation into pieces that threads take one after another (wire/ring/threads.py).

Each size here is the smallest for which waking another thread was measured to pay. The block sizes are those of
wire/ring/kernels.c.
"""

from __future__ import annotations

import torch

_REGISTER_ROWS, _BLOCK_ROWS = 3, 48
_SHARED_ROWS = 2 * _BLOCK_ROWS
"""The number of rows from which threads share the rows; with fewer rows they share the columns. Each thread packs both
operands of its piece, so a piece of the shared operand must be large beside what the thread packs of the other
operand."""
_SHARED_COLUMNS = 256
_SHARED_NUMBERS = 1 << 18
"""How many numbers there must be to encode or decode before other threads help; one thread takes 0.2 ms for so many."""
_SHARED_WORK = 1 << 24
"""How many multiplications there must be before other threads help. One thread takes 0.7 ms for so many, and waking a
thread was measured to take 0.1 ms."""

Piece = tuple[int, int, int, int]
"""A piece of a product: start and end row, start and end column; the ends are not included."""


def row_pieces(num_rows: int, columns: int) -> list[tuple[int, int]]:
    """Returns the pieces, each as (first row, number of rows), that threads take one after another."""
    num_pieces = 2 * torch.get_num_threads() if num_rows * columns >= _SHARED_NUMBERS else 1
    step = max(1, -(-num_rows // num_pieces))
    return [(start, min(step, num_rows - start)) for start in range(0, num_rows, step)]


def product_pieces(num_rows: int, d: int, m: int) -> list[Piece]:
    """Returns the pieces that threads take. There are about two for each thread, so that a core that is busy elsewhere
    does not delay the others."""
    num_pieces = 2 * torch.get_num_threads()
    if num_pieces <= 2 or num_rows * d * m < _SHARED_WORK:
        return [(0, num_rows, 0, m)]
    if num_rows >= _SHARED_ROWS:
        step = _step(num_rows, num_pieces, _REGISTER_ROWS)
        return [(start, min(num_rows, start + step), 0, m) for start in range(0, num_rows, step)]
    step = _step(m, num_pieces, _SHARED_COLUMNS)
    return [(0, num_rows, start, min(m, start + step)) for start in range(0, m, step)]


def _step(length: int, num_pieces: int, block: int) -> int:
    return max(1, -(-length // (num_pieces * block))) * block
