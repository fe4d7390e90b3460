"""Makes random rows for ring products."""

from __future__ import annotations

import torch

COLS = 32
"""The number of columns of the first group's rows, which is the hidden size of a tiny model."""


def ring_rows(num_rows: int, cols: int = COLS, seed: int | None = None) -> torch.Tensor:
    """Returns uniform int32 rows, shape (num_rows, cols). With a seed the rows are always the same; without one they
    differ at each call."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (num_rows, cols), generator=generator, dtype=torch.int64).to(torch.int32)
