"""Defines the command that rank 0 sends to the other ranks before every product.

A command is a message of fixed size that holds plain numbers, and no pickle. If there are only a few rows, the message
also holds the rows. To send one decode row in a second message took four times as long, since gloo's receiver must
announce for every message that it is ready (docs/placement.md, "Figures").
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import torch

from wire.frame import DTYPES, Arithmetic, Call, Direction, Purpose
from wire.ring.seeded_rows import Rows, SeededRows

_HEAD = struct.Struct("<8q32s32x")
_HEAD_NUMBERS = _HEAD.size // 4
INLINE_NUMBERS = 8192
"""The limit on the number of elements of all rows in a command, which is enough for one row of most layers. To send
these 32 KiB takes only microseconds on loopback."""
NUM_NUMBERS = _HEAD_NUMBERS + INLINE_NUMBERS
_NO_CALL = Call(0, Direction.FORWARD, Arithmetic.RING)


class Operation(IntEnum):
    """Lists the operations that rank 0 can request from the other ranks."""

    STOP = 0
    HEARTBEAT = 1
    PRODUCT = 2


@dataclass(frozen=True)
class Command:
    """Holds one operation and its arguments.

    Attributes:
        operation: the operation.
        call: the call whose product the ranks compute; a placeholder if the operation is not PRODUCT.
        num_rows, cols: the shape of the rows; `cols` is 0 if `rows` is a seed.
        rows: the rows if there are few of them, or the seed of the rows; None if the rows follow in a separate message.
            It has no meaning if the operation is not PRODUCT.
    """

    operation: Operation
    call: Call = _NO_CALL
    num_rows: int = 0
    cols: int = 0
    rows: Rows | None = None

    @classmethod
    def product(cls, call: Call, rows: Rows) -> Command:
        """Returns the command to compute one product; a seed, or a few rows, are in the command itself."""
        if isinstance(rows, SeededRows):
            return cls(Operation.PRODUCT, call, rows.num_rows, 0, rows)
        inline = rows if rows.numel() <= INLINE_NUMBERS else None
        return cls(Operation.PRODUCT, call, rows.shape[0], rows.shape[1], inline)

    def pack(self) -> torch.Tensor:
        """Returns the command as a message: int32, shape (NUM_NUMBERS,)."""
        call, rows = self.call, self.rows
        first_row, seed = (rows.first_row, rows.seed) if isinstance(rows, SeededRows) else (0, b"")
        head = _HEAD.pack(
            self.operation, call.group, call.direction, call.arithmetic, call.purpose, self.num_rows, self.cols,
            first_row, seed,
        )  # fmt: skip
        numbers = torch.zeros(NUM_NUMBERS, dtype=torch.int32)
        numbers[:_HEAD_NUMBERS] = torch.frombuffer(bytearray(head), dtype=torch.int32)
        if isinstance(rows, torch.Tensor):
            # float32 rows keep their bits.
            numbers[_HEAD_NUMBERS : _HEAD_NUMBERS + rows.numel()] = rows.reshape(-1).view(torch.int32)
        return numbers

    @classmethod
    def unpack(cls, numbers: torch.Tensor) -> Command:
        """Returns the command in a message that `pack` made; the command's rows are a view of the message.

        Raises:
            ValueError: the message names an operation, direction, arithmetic or purpose that does not exist.
        """
        operation, group, direction, arithmetic, purpose, num_rows, cols, first_row, seed = _HEAD.unpack(
            numbers[:_HEAD_NUMBERS].numpy().tobytes()
        )
        call = Call(group, Direction(direction), Arithmetic(arithmetic), Purpose(purpose))
        rows: Rows | None = None
        if call.purpose is Purpose.HINT:
            rows = SeededRows(seed, first_row, num_rows)
        elif num_rows * cols <= INLINE_NUMBERS:
            flat = numbers[_HEAD_NUMBERS : _HEAD_NUMBERS + num_rows * cols]
            rows = flat.view(DTYPES[call.arithmetic]).view(num_rows, cols)
        return cls(Operation(operation), call, num_rows, cols, rows)

    def empty_rows(self) -> torch.Tensor:
        """Returns an uninitialised tensor that can receive the rows of this command, which follow in a separate
        message."""
        return torch.empty(self.num_rows, self.cols, dtype=DTYPES[self.call.arithmetic])
