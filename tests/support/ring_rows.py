"""Random rows of a ring product."""

from __future__ import annotations

import torch

COLS = 32
"""The hidden size of a tiny model, and so the columns of its first group's rows."""


def ring_rows(num_rows: int, cols: int = COLS, seed: int | None = None) -> torch.Tensor:
    """Returns uniform int32 rows, shape (num_rows, cols): the same ones for the same seed, others each time without."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (num_rows, cols), generator=generator, dtype=torch.int64).to(torch.int32)
