"""Exact arithmetic in Z_q, q = 2^32: the product with int8 weights, and real rows to ring rows and back.

Guarantees: `product` is exact mod 2^32 for every int32 input; `encode` chooses scales with which a centred result
never wraps, by a deterministic bound. Ring elements are int32 tensors read mod 2^32, so `centred` costs nothing.
Source: DESIGN.md, section 3.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator, Sequence

import torch

from wire.errors import InvalidTensor, MaskOverflow

HALF_MODULUS = 2.0**31
_ROUND_OFF = 1.0 - 2.0**-20
"""Shrinks the budget by more than the fp32 rounding of norm, scale and quotient together (each below 2^-23)."""
_SMALLEST_SCALE = 2.0**-100
"""A row whose scale would be smaller is sent with fewer bits rather than with a denormal scale."""
_EXACT_FLOAT64_ROWS = 1 << 15
"""2^31 · 127 · 2^15 < 2^53: so many products sum without rounding in float64."""
_BYTE_VALUES = torch.tensor([[1, 1 << 8, 1 << 16, 1 << 24]], dtype=torch.int32)
_FEW_ROWS = 4
_SCRATCH_BYTES = 32 << 20
"""Each thread that multiplies keeps up to so much, or what 32 rows need where that is more; a block of a layer with
3,072 outputs has 600 rows in it."""
_LEAST_BLOCK = 32
_local = threading.local()


def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """rows · weight mod 2^32, exactly.

    Args:
        rows: int32, shape (num_rows, d), contiguous or not, CPU or CUDA.
        weight: int8, shape (d, m), same device; a transposed view is as good as a contiguous one.

    Returns:
        int32, shape (num_rows, m).

    Raises:
        InvalidTensor: wrong dtype or shapes that do not meet.
    """
    _check(rows, weight)
    if rows.shape[0] and _is_for_limbs(weight):
        return _product_by_limbs(rows, weight)
    return _product_by_float64(rows, weight)


def products(parts: Sequence[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    """`product` of each matrix, by one multiplication of all their rows together; none is copied to be put together.

    Args:
        parts: at least one, each int32, shape (its rows, d), contiguous or not, same device.
        weight: int8, shape (d, m).

    Returns:
        int32, shape (its rows, m) each, with memory of their own.

    Raises:
        InvalidTensor: see `product`.
    """
    for rows in parts:
        _check(rows, weight)
    if not _is_for_limbs(weight) or not any(rows.shape[0] for rows in parts):
        return [product(rows, weight) for rows in parts]
    if sum(rows.shape[0] for rows in parts) > _FEW_ROWS:
        return _products_in_blocks(parts, weight)
    together = _product_by_limbs(torch.cat(list(parts)), weight)
    return [part.clone() for part in together.split([rows.shape[0] for rows in parts])]


def _check(rows: torch.Tensor, weight: torch.Tensor) -> None:
    if rows.dtype != torch.int32 or weight.dtype != torch.int8 or rows.shape[1] != weight.shape[0]:
        raise InvalidTensor(f"expected int32 rows of {weight.shape[0]} columns, got {rows.dtype} of {rows.shape[1]}")


def _is_for_limbs(weight: torch.Tensor) -> bool:
    return min(weight.shape) > 1 and weight.device.type == "cpu" and int_mm_is_exact()


def _product_by_limbs(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """One int8 GEMM over the four bytes of each number, stacked as rows; little-endian byte order."""
    num_rows = rows.shape[0]
    if num_rows > _FEW_ROWS:
        return _products_in_blocks([rows], weight)[0]
    parts = torch._int_mm(_limbs(rows).reshape(4 * num_rows, -1), weight)  # type: ignore[no-untyped-call]
    # one call in place of three: sums in int32 wrap mod 2^32, and for so few numbers the plain loop is fast
    return torch.mm(_BYTE_VALUES, parts.view(4, -1)).view(num_rows, weight.shape[1])


def _limbs(rows: torch.Tensor) -> torch.Tensor:
    """The four bytes of each number, uint8, shape (4, num_rows, d)."""
    num_rows, d = rows.shape
    return rows.contiguous().view(torch.uint8).view(num_rows, d, 4).permute(2, 0, 1)


def _products_in_blocks(parts: Sequence[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    """The same for many rows, a block at a time, in scratch memory that is kept: fresh pages cost a third more."""
    d, m = weight.shape
    replies = [torch.empty(rows.shape[0], m, dtype=torch.int32) for rows in parts]
    pairs = [(_limbs(rows), reply) for rows, reply in zip(parts, replies, strict=True)]
    num_rows = sum(rows.shape[0] for rows in parts)
    step = max(_LEAST_BLOCK, min(num_rows, _SCRATCH_BYTES // (4 * d + 16 * m)))
    for block in _blocks(pairs, step):
        count = sum(target.shape[0] for _, target in block)
        stacked, sums = _scratch(4 * count, d, m)
        stacked, place = stacked.view(4, count, d), 0
        for limbs, target in block:
            stacked[:, place : place + target.shape[0]].copy_(limbs)
            place += target.shape[0]
        torch._int_mm(stacked.view(4 * count, d), weight, out=sums)  # type: ignore[no-untyped-call]
        sums, place = sums.view(4, count, m), 0
        for _, target in block:
            first, second, third, fourth = sums[:, place : place + target.shape[0]]
            torch.add(first, second, alpha=1 << 8, out=target)  # int32 wraps mod 2^32, which is what the ring asks for
            target.add_(third, alpha=1 << 16).add_(fourth, alpha=1 << 24)
            place += target.shape[0]
    return replies


def _blocks(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], step: int
) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Limbs and where their sums go, `step` rows at a time, whoever's they are."""
    block: list[tuple[torch.Tensor, torch.Tensor]] = []
    room = step
    for limbs, reply in pairs:
        start = 0
        while start < reply.shape[0]:
            stop = min(reply.shape[0], start + room)
            block.append((limbs[:, start:stop], reply[start:stop]))
            room, start = room - (stop - start), stop
            if not room:
                yield block
                block, room = [], step
    if block:
        yield block


def _scratch(rows: int, d: int, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This thread's uint8 (rows, d) and int32 (rows, m); good until its next call."""
    sums = -(-rows * d // 64) * 64  # where the sums begin: on a cache line
    needed = sums + 4 * rows * m
    buffer: torch.Tensor | None = getattr(_local, "scratch", None)
    if buffer is None or buffer.shape[0] < needed:
        with torch.inference_mode(False):  # one made inside could not be written to outside, for this thread's life
            buffer = _local.scratch = torch.empty(needed, dtype=torch.uint8)
    return buffer[: rows * d].view(rows, d), buffer[sums:needed].view(torch.int32).view(rows, m)


def _product_by_float64(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(rows.shape[0], weight.shape[1], dtype=torch.int64, device=rows.device)
    for start in range(0, rows.shape[1], _EXACT_FLOAT64_ROWS):
        stop = start + _EXACT_FLOAT64_ROWS
        total += (rows[:, start:stop].to(torch.float64) @ weight[start:stop].to(torch.float64)).to(torch.int64)
    return to_int32(total)


def to_int32(wide: torch.Tensor) -> torch.Tensor:
    """int64 numbers reduced mod 2^32 into the int32 that stands for them."""
    return ((wide + (1 << 31)).remainder(1 << 32) - (1 << 31)).to(torch.int32)


@functools.cache
def int_mm_is_exact() -> bool:
    """Whether this machine's private `torch._int_mm` multiplies uint8 by int8 exactly; older kernels saturated."""
    limbs = torch.full((4, 512), 255, dtype=torch.uint8)
    weight = torch.full((512, 16), -127, dtype=torch.int8)
    weight[:, 1::2] = 127
    exact = limbs.to(torch.int64) @ weight.to(torch.int64)
    try:
        layouts = (weight, weight.t().contiguous().t())
        return all(torch.equal(torch._int_mm(limbs, w).to(torch.int64), exact) for w in layouts)  # type: ignore[no-untyped-call]
    except (RuntimeError, AttributeError):
        return False


def encode(
    rows: torch.Tensor, weight_norm: float, error_norm: float = 0.0, slack: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales each row into the ring: x̃ = round(x / β) with the smallest β for which no product wraps.

    (‖x̃‖₂ + error_norm) · weight_norm + slack < 2^31 holds for the x̃ after rounding, since rounding moves each
    coordinate by at most a half and so the norm by at most √d / 2.

    Args:
        rows: float, shape (num_rows, d), CPU or CUDA.
        weight_norm: largest column norm of the integer weight (row norm for the backward direction).
        error_norm: largest ‖e‖₂ of a mask's error rows; 0 without one.
        slack: bound of everything else in the product, such as hint rounding; 0 without it.

    Returns:
        x̃, int32, shape (num_rows, d); β, float32, shape (num_rows, 1), secret.

    Raises:
        InvalidTensor: a value that is not finite.
        MaskOverflow: the layer is too wide for any scale.
    """
    d = rows.shape[1]
    budget = ((HALF_MODULUS - slack) / weight_norm - error_norm) * _ROUND_OFF - 0.5 * math.sqrt(d)
    if budget < 1.0:
        raise MaskOverflow(f"a layer with {d} inputs leaves no room for data in 32 bits")
    if rows.shape[0] == 1 and rows.device.type == "cpu":
        return _encode_one(rows, budget)
    # float64 norm: squares of fp32 values neither overflow nor vanish in it
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)
    if not bool(torch.isfinite(norms).all()):
        raise InvalidTensor("a row holds NaN or infinity: nothing was sent")
    beta = (norms / budget).clamp_min_(_SMALLEST_SCALE)
    encoded = torch.mul(rows, beta.reciprocal().to(torch.float32)).round_().to(torch.int32)
    return encoded, beta.to(torch.float32)


def _encode_one(row: torch.Tensor, budget: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The same numbers as the general case gives, in fewer operations: decode encodes one row at a time."""
    norm = float(torch.linalg.vector_norm(row, dtype=torch.float64))
    if not math.isfinite(norm):
        raise InvalidTensor("a row holds NaN or infinity: nothing was sent")
    beta = max(norm / budget, _SMALLEST_SCALE)
    return torch.mul(row, 1.0 / beta).round_().to(torch.int32), torch.tensor([[beta]], dtype=torch.float32)


def decode(reply: torch.Tensor, beta: torch.Tensor, alpha: torch.Tensor | None = None) -> torch.Tensor:
    """y = β · α ⊙ centred(reply).

    Args:
        reply: int32, shape (num_rows, m), mask already taken off.
        beta: float32, shape (num_rows, 1), from `encode`.
        alpha: float32, shape (m,); None for the backward direction, where α went into the rows.

    Returns:
        float32, shape (num_rows, m).
    """
    if alpha is None:
        return torch.mul(reply, beta)
    return torch.mul(reply, alpha).mul_(beta)
