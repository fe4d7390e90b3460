"""Stands in for `wire.ring.int_mm.multiply` on machines where it is wrong or missing."""

from __future__ import annotations

import torch


def saturating(limbs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiplies as processors without VNNI do: sums of neighbours saturate at 16 bits."""
    pairs = limbs.to(torch.int64)[:, :, None] * weight.to(torch.int64)[None]
    return (pairs[:, ::2] + pairs[:, 1::2]).clamp(-(2**15), 2**15 - 1).sum(1).to(torch.int32)


def missing(limbs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Fails as `torch._int_mm` does where it is not implemented."""
    raise RuntimeError("_int_mm is not implemented")


def gone(limbs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Fails as a torch does that has no such function."""
    raise AttributeError("module 'torch' has no attribute '_int_mm'")
