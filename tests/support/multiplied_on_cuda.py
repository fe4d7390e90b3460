"""Multiplies on a GPU with the Triton kernels, for tests that do so in a process of its own."""

from __future__ import annotations

import torch

from wire.ring import product_triton


def multiplied_on_cuda(rows: torch.Tensor, weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the product of rows and a weight on the first CUDA device, brought back to the CPU."""
    # Moving a tensor keeps its strides.
    return product_triton.product(rows.cuda(), weight.cuda(), bits).cpu()
