"""Replaces `wire.ring.product_cuda.multiply` by functions that behave as on machines where it is wrong or missing."""

from __future__ import annotations

import torch


def saturating(limbs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiplies as processors without VNNI do, where sums of neighbouring products saturate at 16 bits."""
    pairs = limbs.to(torch.int64)[:, :, None] * weight.to(torch.int64)[None]
    return (pairs[:, ::2] + pairs[:, 1::2]).clamp(-(2**15), 2**15 - 1).sum(1).to(torch.int32)


def missing(limbs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Raises the error of a device for which `torch._int_mm` is not implemented."""
    raise RuntimeError("_int_mm is not implemented")


def gone(limbs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Raises the error of a torch that has no `_int_mm`."""
    raise AttributeError("module 'torch' has no attribute '_int_mm'")
