"""Rows and weights for ring products, in several memory layouts, and the product by Python integers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

LOWEST, HIGHEST = -(2**31), 2**31 - 1
EXTREMES = torch.tensor([LOWEST, LOWEST + 1, -65536, -256, -255, -1, 0, 1, 255, 256, HIGHEST - 1, HIGHEST])
"""Numbers next to where limbs, signs and int32 wrap."""
LAYOUTS = ("contiguous", "transposed", "strided", "columns")
"""What `laid_out` can do."""
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A kernel: rows and a weight give their product."""


def reference(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns the product mod 2^32 by Python integers."""
    exact = rows.numpy().astype(object) @ weight.numpy().astype(object)
    centred = (exact + 2**31) % 2**32 - 2**31
    return torch.from_numpy(np.asarray(centred, dtype=np.int64)).to(torch.int32).view(rows.shape[0], weight.shape[1])


def laid_out(matrix: torch.Tensor, layout: str) -> torch.Tensor:
    """Returns the same numbers in another memory order, one of LAYOUTS."""
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
    """Returns rows and a weight that are half random numbers, half extremes."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(LOWEST, HIGHEST + 1, (num_rows, d), generator=generator)
    extremes = EXTREMES[torch.randint(len(EXTREMES), (num_rows, d), generator=generator)]
    rows = torch.where(torch.rand(num_rows, d, generator=generator) < 0.5, rows, extremes).to(torch.int32)
    weight = torch.randint(-127, 128, (d, m), generator=generator)
    weight = torch.where(torch.rand(d, m, generator=generator) < 0.3, torch.where(weight < 0, -127, 127), weight)
    return rows, weight.to(torch.int8)
