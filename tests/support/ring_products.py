"""One ring product of a tiny model: its rows, how a tenant asks for it, and that it is answered."""

from __future__ import annotations

import torch

from provider.model.served_model import ServedModel
from wire.frame import Arithmetic, Call, Direction
from wire.transport.connection import Connection

CALL = Call(0, Direction.FORWARD, Arithmetic.RING)

COLS, REPLY_COLS = 32, 64


def ring_rows(num_rows: int, cols: int = COLS) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (num_rows, cols), dtype=torch.int32)


def ask(connection: Connection, rows: torch.Tensor, call: Call = CALL, reply_cols: int = REPLY_COLS) -> torch.Tensor:
    return connection.submit(call, rows, reply_cols).result()


def assert_served(connection: Connection, served_model: ServedModel) -> None:
    rows = ring_rows(3)
    assert torch.equal(ask(connection, rows), served_model.compute(CALL, rows))
