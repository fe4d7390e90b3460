"""What rank 0 tells the others before every product: sixteen numbers in a tensor, never a pickle."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import torch

from wire.expand import Rows, SeededRows
from wire.frame import DTYPES, Arithmetic, Call, Direction, Purpose

NUM_NUMBERS = 16
_SEED = struct.Struct("<4q")
_SEED_PLACE = slice(12, 16)


_NO_CALL = Call(0, Direction.FORWARD, Arithmetic.RING)


class Operation(IntEnum):
    """What the ranks do next."""

    STOP = 0
    HEARTBEAT = 1
    PRODUCT = 2


@dataclass(frozen=True)
class Command:
    """One operation.

    Attributes:
        call: which product.
        num_rows, cols: shape of the rows that follow; nothing follows a seed, whose rows each rank makes itself.
        seeded: for a hint, instead of rows.
    """

    operation: Operation
    call: Call = _NO_CALL
    num_rows: int = 0
    cols: int = 0
    seeded: SeededRows | None = None

    @classmethod
    def product(cls, call: Call, rows: Rows) -> Command:
        """The command for one product."""
        if isinstance(rows, SeededRows):
            return cls(Operation.PRODUCT, call, rows.num_rows, 0, rows)
        return cls(Operation.PRODUCT, call, rows.shape[0], rows.shape[1])

    def pack(self) -> torch.Tensor:
        """int64, shape (16,)."""
        call, seeded = self.call, self.seeded
        numbers = torch.zeros(NUM_NUMBERS, dtype=torch.int64)
        head = [self.operation, call.group, call.direction, call.arithmetic, call.purpose, self.num_rows, self.cols]
        numbers[: len(head)] = torch.tensor(head)
        if seeded is not None:
            numbers[len(head)] = seeded.first_row
            numbers[_SEED_PLACE] = torch.tensor(_SEED.unpack(seeded.seed))
        return numbers

    @classmethod
    def unpack(cls, numbers: torch.Tensor) -> Command:
        """Reads what `pack` made.

        Raises:
            ValueError: numbers that are no command.
        """
        operation, group, direction, arithmetic, purpose, num_rows, cols, first_row = numbers[:8].tolist()
        call = Call(group, Direction(direction), Arithmetic(arithmetic), Purpose(purpose))
        seeded = None
        if call.purpose is Purpose.HINT:
            seeded = SeededRows(_SEED.pack(*numbers[_SEED_PLACE].tolist()), first_row, num_rows)
        return cls(Operation(operation), call, num_rows, cols, seeded)

    def empty_rows(self) -> torch.Tensor:
        """Room for the rows that follow."""
        return torch.empty(self.num_rows, self.cols, dtype=DTYPES[self.call.arithmetic])
