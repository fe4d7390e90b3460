"""This module wraps torch's private `_int_mm`, which multiplies bytes and sums the products in int32.

This module does not guarantee exact numbers, since older CPU kernels saturate. Callers must first check
`int_mm_is_exact` of wire/ring/product.py or `is_exact` of wire/ring/product_cuda.py, and compute the product another
way if that is False.
"""

from __future__ import annotations

import torch


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the matrix product left · right.

    Args:
        left: int8, or on a CPU uint8, shape (num_rows, d).
        right: int8, shape (d, m), same device.
        out: int32, shape (num_rows, m), contiguous, which the product is written to; None allocates new memory.

    Raises:
        RuntimeError: this machine or device has no such kernel, or the kernel refuses these shapes.
        AttributeError: this torch has no `_int_mm`.
    """
    product: torch.Tensor = (
        torch._int_mm(left, right) if out is None else torch._int_mm(left, right, out=out)  # type: ignore[no-untyped-call]
    )
    return product
