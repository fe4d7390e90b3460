"""Solves linear systems mod 2. One elimination serves many right-hand sides.

Results are exact. A right-hand side that the matrix cannot produce is reported as inconsistent. A random right-hand
side is consistent with probability 2^-(num_equations − rank).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint8]


class BinarySystem:
    """Solves M·x = b mod 2 for one matrix M and many b. The matrix is reduced once.

    Attributes:
        rank: the rank of M; a solution x is unique if this equals the number of unknowns.
    """

    def __init__(self, matrix: Bits) -> None:
        """Reduces the matrix M by Gaussian elimination, so that each right-hand side is then solved quickly.

        Args:
            matrix: M, of 0 and 1, shape (num_equations, num_unknowns).
        """
        num_equations, self._num_unknowns = matrix.shape
        rows = _pack(np.concatenate((matrix, np.eye(num_equations, dtype=np.uint8)), axis=1))
        self.rank = _eliminate(rows, self._num_unknowns)
        wide = np.unpackbits(rows.view(np.uint8), axis=1, count=self._num_unknowns + num_equations)
        # Elimination multiplies a right-hand side by this matrix, shape (num_equations, num_equations). Its dtype
        # float32 is exact for sums below 2^24.
        self._transform = wide[:, self._num_unknowns :].astype(np.float32)

    @property
    def has_full_rank(self) -> bool:
        """Returns whether M has full column rank, so that M·x = b has at most one solution x for any b."""
        return bool(self.rank == self._num_unknowns)

    def consistent(self, sides: Bits) -> npt.NDArray[np.bool_]:
        """Returns, for each right-hand side, whether it has a solution.

        Args:
            sides: the right-hand sides, one per column; 0 and 1, shape (num_equations, count).

        Returns:
            bool, shape (count,).
        """
        left = self._transform[self.rank :] @ sides.astype(np.float32)
        return np.asarray(~np.any(left.astype(np.int64) & 1, axis=0))

    def solve(self, side: Bits) -> Bits | None:
        """Returns the solution x of M·x = side, shape (num_unknowns,); None if there is no solution or more than
        one."""
        if not self.has_full_rank or not self.consistent(side[:, None]).all():
            return None
        solution = self._transform[: self.rank] @ side.astype(np.float32)
        return np.asarray(solution.astype(np.int64) & 1, dtype=np.uint8)


def _pack(bits: Bits) -> npt.NDArray[np.uint64]:
    packed = np.packbits(bits, axis=1)
    padded = np.zeros((packed.shape[0], -(-packed.shape[1] // 8) * 8), dtype=np.uint8)
    padded[:, : packed.shape[1]] = packed
    return padded.view(np.uint64)


def _eliminate(rows: npt.NDArray[np.uint64], num_columns: int) -> int:
    """Reduces the first `num_columns` columns of the packed bits in place, moves the pivot rows to the front, and
    returns the rank."""
    octets, rank = rows.view(np.uint8), 0
    for column in range(num_columns):
        has_bit = (octets[:, column // 8] >> (7 - column % 8)) & 1
        below = np.flatnonzero(has_bit[rank:])
        if below.size == 0:
            continue
        pivot = rank + int(below[0])
        if pivot != rank:
            rows[[rank, pivot]] = rows[[pivot, rank]]
            has_bit[[rank, pivot]] = has_bit[[pivot, rank]]
        has_bit[rank] = 0
        rows[has_bit.astype(bool)] ^= rows[rank]
        rank += 1
    return rank
