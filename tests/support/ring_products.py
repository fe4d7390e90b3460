"""Requests one ring product of a tiny model, and checks the reply."""

from __future__ import annotations

import torch

from provider.model.served_model import ServedModel
from tests.support.payloads import payload_of
from tests.support.ring_rows import COLS, ring_rows
from wire.frame import Arithmetic, Call, Direction
from wire.ring.seeded_rows import Rows
from wire.transport.connection import Connection

CALL = Call(0, Direction.FORWARD, Arithmetic.RING)
"""A call of the first layer group of a tiny Llama."""
REPLY_COLS = 64
"""The number of columns of a reply of that group."""


def ask(connection: Connection, rows: Rows, call: Call = CALL, reply_cols: int = REPLY_COLS) -> torch.Tensor:
    """Sends one request and returns its reply."""
    cols = COLS if reply_cols == REPLY_COLS else REPLY_COLS
    return connection.submit(call, payload_of(rows, cols), reply_cols).result()


def assert_served(connection: Connection, served_model: ServedModel) -> None:
    """Checks that a connection returns the same product as the model itself."""
    rows = ring_rows(3)
    assert torch.equal(ask(connection, rows), served_model.compute(CALL, rows))
