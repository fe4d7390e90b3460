"""This module turns real rows into ring rows and ring replies into real rows. The ring is Z_q with q = 2^32.

Guarantees: `product`, from wire/ring/product.py, is exact mod 2^32 for every int32 input. `encode` chooses scales by a
deterministic bound, so that no result leaves [−2^31, 2^31) and wraps. Ring elements are int32 tensors, whose numbers
already lie in this range. Source: wire/SPEC.md, section 5.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from wire.errors import MaskOverflow, NotFinite
from wire.ring import codec_triton, kernels
from wire.ring.buffers import unwritten_tensor
from wire.ring.product import product, products, to_int32
from wire.ring.widths import unpacked_effect

__all__ = ["HALF_MODULUS", "RowCodec", "decode", "encode", "product", "products", "to_int32"]

HALF_MODULUS = 2.0**31
_ROUND_OFF = 1.0 - 2.0**-20
"""The factor by which `largest_norm` reduces the largest norm of an encoded row. The reduction is more than the fp32
rounding errors of norm, scale and quotient together, each of which is below 2^-23."""
SMALLEST_SCALE = 2.0**-100
"""The smallest scale that a row may have, so that no scale is denormal. A row that would need a smaller scale is sent
with fewer bits."""
_NOT_FINITE = "a row holds NaN or infinity: nothing was sent"


def encode(
    rows: torch.Tensor,
    weight_norm: float,
    error_norm: float = 0.0,
    slack: float = 0.0,
    alpha: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales each row into the ring: x̃ = round(x / β), with a scale β that is just large enough that no product wraps,
    and at least 2^-100.

    The rounded x̃ satisfies (‖x̃‖₂ + error_norm) · weight_norm + slack < 2^31. Rounding moves each coordinate by at
    most a half, and so the norm by at most √d / 2, which the choice of β allows for.

    Args:
        rows: float, shape (num_rows, d), CPU or CUDA.
        weight_norm: the largest column norm of the integer weight (row norm for the backward direction).
        error_norm: the largest ‖e‖₂ of a mask's error rows e; 0 without a mask.
        slack: a bound on every other error in the product, such as that of the rounded hints of the mask `lattice`; 0
            if there is none.
        alpha: float32, shape (d,), on the rows' device; the rows are first multiplied by it. None stands for ones.

    Returns:
        x̃, int32, shape (num_rows, d); β, float32, shape (num_rows, 1), which must stay secret.

    Raises:
        NotFinite: a value is NaN or infinite, or becomes so when it is multiplied by `alpha`.
        MaskOverflow: the layer is too wide for any scale.
    """
    d = rows.shape[1]
    budget = largest_norm(d, weight_norm, error_norm, slack)
    if rows.dtype == torch.float32 and kernels.available() and kernels.codes(rows):
        encoded = unwritten_tensor(rows.shape[0], d, torch.int32)
        scales = kernels.encode(rows, alpha, budget, SMALLEST_SCALE, encoded)
        if scales is None:
            raise NotFinite(_NOT_FINITE)
        return encoded, scales
    if rows.is_cuda and rows.dtype == torch.float32 and codec_triton.is_usable(rows.device):
        coded = codec_triton.encode(rows, alpha, budget, SMALLEST_SCALE)
        if coded is None:
            raise NotFinite(_NOT_FINITE)
        return coded
    if alpha is not None:
        rows = rows * alpha
    # The norm is computed in float64, in which squares of fp32 values neither overflow nor vanish.
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)
    if not bool(torch.isfinite(norms).all()):
        raise NotFinite(_NOT_FINITE)
    beta = (norms / budget).clamp_min_(SMALLEST_SCALE)
    encoded = torch.mul(rows, beta.reciprocal().to(torch.float32)).round_().to(torch.int32)
    return encoded, beta.to(torch.float32)


def largest_norm(d: int, weight_norm: float, error_norm: float, slack: float) -> float:
    """Returns the largest 2-norm that a scaled row x / β may have before it is rounded; see `encode`. Raises
    MaskOverflow if that is below 1."""
    budget = ((HALF_MODULUS - slack) / weight_norm - error_norm) * _ROUND_OFF - 0.5 * math.sqrt(d)
    if budget < 1.0:
        raise MaskOverflow(f"a layer with {d} inputs leaves no room for data in 32 bits")
    return budget


class RowCodec:
    """Encodes and decodes one row at a time with the compiled kernels, directly into and from the memory of
    messages."""

    def __init__(
        self,
        widths: tuple[int, int],
        weight_norm: float,
        error_norm: float,
        slack: float,
        alpha: torch.Tensor | None,
        reply_alpha: torch.Tensor | None,
    ) -> None:
        """Computes the constants that encode and decode the rows of one layer group in one direction.

        Args:
            widths: how many numbers a request row and a reply row have.
            weight_norm, error_norm, slack, alpha: see `encode`.
            reply_alpha: the `alpha` of `decode`.

        Raises:
            MaskOverflow: the layer is too wide for any scale.
            InvalidTensor: this machine has no compiled kernels, or `alpha` or `reply_alpha` is not contiguous float32
                of the right length on the CPU.
        """
        budget = largest_norm(widths[0], weight_norm, error_norm, slack)
        self._coded = kernels.RowCodec(alpha, reply_alpha, *widths, budget, SMALLEST_SCALE)
        self.add, self.decode = self._coded.add, self._coded.decode

    def encode(self, row: torch.Tensor, out: memoryview) -> Any:
        """Encodes a row into a message and returns its scale; see `kernels.RowCodec.encode`.

        Raises:
            NotFinite: a value is NaN or infinite.
            InvalidTensor: an argument is not as `kernels.RowCodec.encode` describes it.
        """
        beta = self._coded.encode(row, out)
        if beta is None:
            raise NotFinite(_NOT_FINITE)
        return beta


def decode(
    reply: torch.Tensor, beta: torch.Tensor, alpha: torch.Tensor | None = None, effect: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the real product that a ring reply holds: y = β · α ⊙ (reply − effect), where the difference is taken mod
    2^32 into [−2^31, 2^31).

    Args:
        reply: int32, shape (num_rows, m).
        beta: β, float32, shape (num_rows, 1), from `encode`.
        alpha: α, float32, shape (m,), on the reply's device; None for the backward direction, in which `encode` has
            multiplied the rows by α.
        effect: int32, shape (num_rows, m), or packed (`wire.ring.widths.pack_effect`), the product of the mask's rows
            and the weight; None if there is no mask, or if the effect has been subtracted already.

    Returns:
        float32, shape (num_rows, m).
    """
    if kernels.available() and kernels.codes(reply) and (effect is None or kernels.subtracts(effect)):
        return kernels.decode(reply, effect, beta, alpha)
    if effect is not None and effect.dtype == torch.uint8:
        whole = unpacked_effect(effect)
        try:
            return decode(reply, beta, alpha, whole)
        finally:
            whole.zero_()  # It would unmask the rows, and its memory is used again, on a device by other processes.
    if reply.is_cuda and codec_triton.is_usable(reply.device):
        return codec_triton.decode(reply, beta, alpha, effect)
    if effect is not None:
        reply = reply - effect
    if alpha is None:
        return torch.mul(reply, beta)
    return torch.mul(reply, alpha).mul_(beta)
