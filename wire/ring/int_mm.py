"""The one place that calls torch's private `_int_mm`, which multiplies bytes and sums in int32.

It guarantees nothing about the numbers: older kernels saturate. Whoever calls it has asked `int_mm_is_exact` of
wire/ring/product.py, or `is_exact` of wire/ring/product_cuda.py, and takes another way where the answer is no.
"""

from __future__ import annotations

import torch


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns left · right.

    Args:
        left: int8, or on a CPU uint8, shape (num_rows, d).
        right: int8, shape (d, m), same device.
        out: int32, shape (num_rows, m), contiguous, written; None for new memory.

    Raises:
        RuntimeError: this machine or device has no such kernel, or it refuses these shapes.
        AttributeError: this torch has none.
    """
    product: torch.Tensor = (
        torch._int_mm(left, right) if out is None else torch._int_mm(left, right, out=out)  # type: ignore[no-untyped-call]
    )
    return product
