"""Exact arithmetic in Z_q, q = 2^32: real rows to ring rows and back, and their products, from wire/ring/product.py.

Guarantees: `product` is exact mod 2^32 for every int32 input; `encode` chooses scales with which a centred result never
wraps, by a deterministic bound. Ring elements are int32 tensors read mod 2^32, so centring costs nothing. Source:
wire/SPEC.md, section 5.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from wire.errors import MaskOverflow, NotFinite
from wire.ring import kernels
from wire.ring.buffers import unwritten_tensor
from wire.ring.product import product, products, to_int32

__all__ = ["HALF_MODULUS", "RowCodec", "decode", "encode", "product", "products", "to_int32"]

HALF_MODULUS = 2.0**31
_ROUND_OFF = 1.0 - 2.0**-20
"""Factor that shrinks the budget by more than the fp32 rounding of norm, scale and quotient together (each below
2^-23)."""
_SMALLEST_SCALE = 2.0**-100
"""Least scale of a row. A row whose scale would be smaller is sent with fewer bits rather than with a denormal
scale."""
_NOT_FINITE = "a row holds NaN or infinity: nothing was sent"


def encode(
    rows: torch.Tensor,
    weight_norm: float,
    error_norm: float = 0.0,
    slack: float = 0.0,
    alpha: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales each row into the ring: x̃ = round(x / β) with the smallest β for which no product wraps.

    (‖x̃‖₂ + error_norm) · weight_norm + slack < 2^31 holds for the x̃ after rounding, since rounding moves each
    coordinate by at most a half and so the norm by at most √d / 2.

    Args:
        rows: float, shape (num_rows, d), CPU or CUDA.
        weight_norm: the largest column norm of the integer weight (row norm for the backward direction).
        error_norm: the largest ‖e‖₂ of a mask's error rows; 0 without a mask.
        slack: a bound of everything else in the product, such as hint rounding; 0 where there is nothing else.
        alpha: float32, shape (d,), on the rows' device; the rows are multiplied by it first. None stands for ones.

    Returns:
        x̃, int32, shape (num_rows, d); β, float32, shape (num_rows, 1), secret.

    Raises:
        NotFinite: a value is NaN or infinite.
        MaskOverflow: the layer is too wide for any scale.
    """
    d = rows.shape[1]
    budget = _budget(d, weight_norm, error_norm, slack)
    if rows.dtype == torch.float32 and kernels.available() and kernels.codes(rows):
        encoded = unwritten_tensor(rows.shape[0], d, torch.int32)
        scales = kernels.encode(rows, alpha, budget, _SMALLEST_SCALE, encoded)
        if scales is None:
            raise NotFinite(_NOT_FINITE)
        return encoded, scales
    if alpha is not None:
        rows = rows * alpha
    # The norm is float64: squares of fp32 values neither overflow nor vanish in it.
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)
    if not bool(torch.isfinite(norms).all()):
        raise NotFinite(_NOT_FINITE)
    beta = (norms / budget).clamp_min_(_SMALLEST_SCALE)
    encoded = torch.mul(rows, beta.reciprocal().to(torch.float32)).round_().to(torch.int32)
    return encoded, beta.to(torch.float32)


def _budget(d: int, weight_norm: float, error_norm: float, slack: float) -> float:
    """Returns the largest 2-norm that an encoded row may have; see `encode`."""
    budget = ((HALF_MODULUS - slack) / weight_norm - error_norm) * _ROUND_OFF - 0.5 * math.sqrt(d)
    if budget < 1.0:
        raise MaskOverflow(f"a layer with {d} inputs leaves no room for data in 32 bits")
    return budget


class RowCodec:
    """Does `encode` and `decode` for one row at a time, into and from messages, by the compiled kernels."""

    def __init__(
        self,
        widths: tuple[int, int],
        weight_norm: float,
        error_norm: float,
        slack: float,
        alpha: torch.Tensor | None,
        reply_alpha: torch.Tensor | None,
    ) -> None:
        """Prepares for rows of one group and direction.

        Args:
            widths: how many numbers a request and its reply have.
            weight_norm, error_norm, slack, alpha: see `encode`.
            reply_alpha: the `alpha` of `decode`.

        Raises:
            MaskOverflow: the layer is too wide for any scale.
            InvalidTensor: there are no kernels here, or the scales are not on the CPU.
        """
        budget = _budget(widths[0], weight_norm, error_norm, slack)
        self._coded = kernels.RowCodec(alpha, reply_alpha, *widths, budget, _SMALLEST_SCALE)
        self.add, self.decode = self._coded.add, self._coded.decode

    def encode(self, row: torch.Tensor, out: memoryview) -> Any:
        """Does what `kernels.RowCodec.encode` does; raises `NotFinite` for a value that is not finite."""
        beta = self._coded.encode(row, out)
        if beta is None:
            raise NotFinite(_NOT_FINITE)
        return beta


def decode(
    reply: torch.Tensor, beta: torch.Tensor, alpha: torch.Tensor | None = None, effect: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes y = β · α ⊙ centred(reply − effect).

    Args:
        reply: int32, shape (num_rows, m).
        beta: float32, shape (num_rows, 1), from `encode`.
        alpha: float32, shape (m,), on the reply's device; None for the backward direction, where α went into the rows.
        effect: int32, shape (num_rows, m), the mask's effect; None where there is none, or it is subtracted already.

    Returns:
        float32, shape (num_rows, m).
    """
    if kernels.available() and kernels.codes(reply) and (effect is None or kernels.codes(effect)):
        return kernels.decode(reply, effect, beta, alpha)
    if effect is not None:
        reply = reply - effect
    if alpha is None:
        return torch.mul(reply, beta)
    return torch.mul(reply, alpha).mul_(beta)
