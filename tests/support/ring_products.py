"""Makes rows and weights for ring products, requests one product of a tiny model, and computes products with Python
integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from provider.model.served_model import ServedModel
from wire.frame import Arithmetic, Call, Direction
from wire.payload import Payload, RowsPayload, SeedPayload
from wire.ring.seeded_rows import Rows, SeededRows
from wire.transport.connection import Connection

COLS = 32
"""The number of columns of the first group's rows, which is the hidden size of a tiny model."""


def ring_rows(num_rows: int, cols: int = COLS, seed: int | None = None) -> torch.Tensor:
    """Returns uniform int32 rows, shape (num_rows, cols). With a seed the rows are always the same; without one they
    differ at each call."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (num_rows, cols), generator=generator, dtype=torch.int64).to(torch.int32)


def payload_of(rows: Rows, cols: int) -> Payload:
    """Returns the payload for rows, or for a seed that stands for rows of `cols` numbers."""
    return SeedPayload(rows, cols) if isinstance(rows, SeededRows) else RowsPayload(rows)


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


LOWEST, HIGHEST = -(2**31), 2**31 - 1
EXTREMES = torch.tensor([LOWEST, LOWEST + 1, -65536, -256, -255, -1, 0, 1, 255, 256, HIGHEST - 1, HIGHEST])
"""Numbers at which limbs, signs and int32 wrap, and their neighbours."""
LAYOUTS = ("contiguous", "transposed", "strided", "columns")
"""The memory layouts that `laid_out` can make."""
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A function that maps rows and a weight to their product."""


def reference(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns the product mod 2^32, computed with Python integers."""
    exact = rows.numpy().astype(object) @ weight.numpy().astype(object)
    centred = (exact + 2**31) % 2**32 - 2**31
    return torch.from_numpy(np.asarray(centred, dtype=np.int64)).to(torch.int32).view(rows.shape[0], weight.shape[1])


def laid_out(matrix: torch.Tensor, layout: str) -> torch.Tensor:
    """Returns the same numbers in another memory layout, one of LAYOUTS."""
    if layout == "transposed":
        return matrix.t().contiguous().t()
    if layout == "strided":
        wide = torch.zeros(matrix.shape[0] * 2, matrix.shape[1] * 3, dtype=matrix.dtype)
        view = wide[::2, ::3]
        return view.copy_(matrix)
    if layout == "columns":
        wide = torch.zeros(matrix.shape[0], matrix.shape[1] + 5, dtype=matrix.dtype)
        return wide[:, 2 : 2 + matrix.shape[1]].copy_(matrix)
    return matrix.contiguous()


def draw(num_rows: int, d: int, m: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns rows and a weight, of which half are random numbers and half are extreme numbers."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(LOWEST, HIGHEST + 1, (num_rows, d), generator=generator)
    extremes = EXTREMES[torch.randint(len(EXTREMES), (num_rows, d), generator=generator)]
    rows = torch.where(torch.rand(num_rows, d, generator=generator) < 0.5, rows, extremes).to(torch.int32)
    weight = torch.randint(-127, 128, (d, m), generator=generator)
    weight = torch.where(torch.rand(d, m, generator=generator) < 0.3, torch.where(weight < 0, -127, 127), weight)
    return rows, weight.to(torch.int8)
