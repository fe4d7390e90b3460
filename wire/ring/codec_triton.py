"""This module encodes rows into the ring and decodes replies on an NVIDIA GPU, each with one kernel in place of ten.

Guarantees: the numbers are those of `wire.ring.coding`'s own form on a device, but for the order in which a norm's
squares are added in float64, and for the budget, which the kernel gets as float32. Both move a scale by less than 2^-22
of it, which `coding._ROUND_OFF` allows for. Callers must ask `is_usable` first; without Triton, or where the self-test
fails, wire/ring/coding.py computes with torch's operations.
"""

from __future__ import annotations

import functools
import logging

import torch

from wire.ring import product_triton

ENCODE_BLOCKS = {"BLOCK": 2048, "num_warps": 8, "enable_fp_fusion": False}
DECODE_BLOCKS = {"BLOCK": 1024, "num_warps": 4, "enable_fp_fusion": False}
_LOGGER = logging.getLogger(__name__)


def encode(
    rows: torch.Tensor, alpha: torch.Tensor | None, budget: float, smallest: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns encoded rows and their scales; see `wire.ring.coding.encode`. None if a value is NaN or infinite.

    Args:
        rows: float32, shape (num_rows, d), on a device for which `is_usable` is True.
        alpha: as for `wire.ring.coding.encode`.
        budget: the largest norm of a scaled row.
        smallest: the smallest scale.
    """
    num_rows, d = rows.shape
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    encoded = torch.empty(num_rows, d, dtype=torch.int32, device=rows.device)
    scales = torch.empty(num_rows, 1, dtype=torch.float32, device=rows.device)
    is_bad = torch.zeros(1, dtype=torch.int32, device=rows.device)
    if num_rows and d:
        with product_triton.on(rows.device):
            product_triton.kernels().encode_rows[(num_rows,)](
                rows, rows if alpha is None else alpha.contiguous(), encoded, scales, is_bad, d, rows.stride(0), budget,
                smallest, HAS_ALPHA=alpha is not None, **ENCODE_BLOCKS,
            )  # fmt: skip
        if bool(is_bad):
            return None
    return encoded, scales if d else scales.fill_(smallest)


def decode(
    reply: torch.Tensor, beta: torch.Tensor, alpha: torch.Tensor | None, effect: torch.Tensor | None
) -> torch.Tensor:
    """Returns the real product of a reply; see `wire.ring.coding.decode`.

    Args:
        reply: int32, shape (num_rows, m), on a device for which `is_usable` is True; the others are on it, too.
        beta: float32, shape (num_rows, 1).
        alpha: float32, shape (m,), or None.
        effect: int32, shape (num_rows, m), or None.

    Returns:
        float32, shape (num_rows, m), contiguous.
    """
    num_rows, m = reply.shape
    out = torch.empty(num_rows, m, dtype=torch.float32, device=reply.device)
    if num_rows and m:
        reply = reply if reply.stride(1) == 1 else reply.contiguous()
        other = reply if effect is None else effect if effect.stride(1) == 1 else effect.contiguous()
        beta = beta.contiguous()  # The kernel reads one scale after another.
        with product_triton.on(reply.device):
            product_triton.kernels().decode_rows[(num_rows, -(-m // DECODE_BLOCKS["BLOCK"]))](
                reply, other, beta if alpha is None else alpha.contiguous(), beta, out, m, reply.stride(0),
                other.stride(0), HAS_EFFECT=effect is not None, HAS_ALPHA=alpha is not None, **DECODE_BLOCKS,
            )  # fmt: skip
    return out


@functools.cache
def is_usable(device: torch.device) -> bool:
    """Tells whether Triton is there and its codec gives the right numbers on a CUDA device. The result is computed once
    for each device. One line is logged if an installed Triton cannot be used."""
    if device.type != "cuda":
        return False
    try:
        passes = passes_self_test(device)
    except ImportError:
        return False
    except Exception as exc:  # noqa: BLE001 - compilers and drivers fail in many ways; torch's operations are right
        _LOGGER.warning("rows are encoded by torch's operations: Triton fails on %s: %s", device, type(exc).__name__)
        return False
    if not passes:
        _LOGGER.warning("rows are encoded by torch's operations: Triton's numbers are wrong on %s", device)
    return passes


def passes_self_test(device: torch.device) -> bool:
    """Tells whether the codec's numbers are those of plain operations on the CPU, with and without α and effect, and
    whether it sees NaN and infinity."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(5, 3001, generator=generator, device="cpu") * torch.tensor(
        [[1e-30], [1.0], [1e4], [0.0], [3e30]]
    )
    alpha = torch.rand(3001, generator=generator, device="cpu") + 0.5
    effect = torch.randint(-(2**31), 2**31, (5, 3001), generator=generator, device="cpu").to(torch.int32)
    budget, smallest = 1.7e7, 2.0**-100
    for factor in (None, alpha):
        there = None if factor is None else factor.to(device)
        found = encode(rows.to(device), there, budget, smallest)
        wide = rows if factor is None else rows * factor
        beta = (torch.linalg.vector_norm(wide, dim=1, keepdim=True, dtype=torch.float64) / budget).clamp_min_(smallest)
        exact = torch.mul(wide, beta.reciprocal().to(torch.float32)).round_().to(torch.int32)
        # The order of additions may move a scale by a unit in its last place, and a number with it.
        if found is None or int((found[0].cpu() - exact).abs().max()) > 2:
            return False
        if not torch.allclose(found[1].cpu(), beta.to(torch.float32), rtol=1e-6, atol=0):
            return False
        for other in (None, effect):
            product = exact if other is None else exact - other
            expected = product.to(torch.float32) if factor is None else product.to(torch.float32) * factor
            scales = beta.to(torch.float32)
            got = decode(exact.to(device), scales.to(device), there, None if other is None else other.to(device))
            if not torch.equal(got.cpu(), expected * scales):
                return False
    for value in (float("nan"), float("inf"), -float("inf")):
        bad = rows.clone()
        bad[2, 2999] = value
        if encode(bad.to(device), None, budget, smallest) is not None:
            return False
    return True
