"""This module multiplies int32 rows by int8 weights mod 2^32 on an NVIDIA GPU, with the GPU's int8 matrix units
(wire/SPEC.md, section 5).

Each number z is split into four signed bytes l_i, called limbs: z ≡ Σ l_i · 2^(8i) mod 2^32, -128 <= l_i <= 127. The
limbs of all rows are stacked for one call of torch's private `_int_mm`, which multiplies bytes and sums the products in
int32. The sums that it returns are shifted and added. `multiply` wraps `_int_mm`, also for the CPU kernels of
wire/ring/product.py.

cuBLAS accepts a call of `torch._int_mm` only if there are more than 16 rows and the widths are multiples of 8. Some
kinds of GPU also require that both operands are contiguous along the inner width (pytorch/pytorch#169956). A weight
with another layout is copied once, and the copy is kept as long as the weight lives. The forward direction needs one
int8 copy. The backward direction needs none if the widths are multiples of 8, since the transposed weight W̃ᵀ has the
right layout already. Everything here also runs on a CPU, where tests compare it with big integers.

Guarantees: `product` is exact mod 2^32 for all numbers, shapes and memory orders, on devices for which `is_exact` is
True. For other devices wire/ring/product.py does not use it. Not guaranteed: that `multiply` gives exact numbers, since
older CPU kernels saturate. Callers must first check `is_exact`, or on a CPU `int_mm_is_exact` of wire/ring/product.py,
and compute the product another way if that is False. Nor that the numbers in this file are the fastest: none of them
was chosen by measuring on a GPU.
"""

from __future__ import annotations

import functools
import threading

import torch
from torch.utils.weak import WeakIdKeyDictionary


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


_MULTIPLE = 8
_ALIGNED_BYTES = 16
"""A weight's address in bytes must be a multiple of this, since int8 kernels load 16 bytes at once. torch aligns
whatever it allocates, but a slice may begin elsewhere."""
_LEAST_ROWS = 8
"""The number of rows to which a smaller number is padded. It gives 32 rows of limbs, more than the 16 that cuBLAS
requires."""
_EXACT_INNER = 1 << 16
"""The largest inner width of one product, chosen so that no sum of limbs leaves int32: 2^16 · 128 · 128 = 2^30. The
largest possible width would be 2^17 - 1."""
_SCRATCH_BYTES = 512 << 20
"""The most bytes of limbs and sums for one block of rows. They suffice for 6,553 rows if the weight is 4096 × 4096."""
_HALF_STEPS = 0x00808080
"""The int32 with 128 in each byte but the highest; `_limbs` uses it."""

_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Maps a weight to a pair: the weight's version number when it was copied, and the copy."""
_lock = threading.Lock()


def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns the matrix product rows · weight mod 2^32, on a device for which `is_exact` is True.

    Args:
        rows: int32, shape (num_rows, d), any strides.
        weight: int8, shape (d, m), same device, any strides. A weight of another layout is copied at its first use, and
            again only if it has changed.

    Returns:
        int32, shape (num_rows, m), contiguous.
    """
    num_rows, (d, m) = rows.shape[0], weight.shape
    reply = torch.empty(num_rows, m, dtype=torch.int32, device=rows.device)
    if 0 in (num_rows, d, m):
        return reply.zero_()
    weight = prepared(weight)
    step = max(_LEAST_ROWS, _SCRATCH_BYTES // (4 * weight.shape[0] + 16 * weight.shape[1]))
    for start in range(0, num_rows, step):
        _multiply(rows[start : start + step], weight, reply[start : start + step])
    return reply


def _multiply(rows: torch.Tensor, weight: torch.Tensor, reply: torch.Tensor) -> None:
    """Writes rows · weight to `reply`, one slice of the inner width at a time. `weight` must be a result of
    `prepared`."""
    num_rows, m = reply.shape
    for start in range(0, rows.shape[1], _EXACT_INNER):
        limbs = _limbs(rows[:, start : start + _EXACT_INNER])
        inner = limbs.shape[2]
        # (4, rows, inner) -> (4 · rows, inner)
        sums = multiply(limbs.view(-1, inner), weight[start : start + inner])
        # (4 · rows, columns) -> (4, rows, columns) -> (4, num_rows, m)
        first, second, third, fourth = sums.view(4, -1, weight.shape[1])[:, :num_rows, :m]
        if start:
            reply.add_(first).add_(second, alpha=1 << 8)
        else:
            torch.add(first, second, alpha=1 << 8, out=reply)
        reply.add_(third, alpha=1 << 16).add_(fourth, alpha=1 << 24)  # int32 wraps mod 2^32.


def _limbs(rows: torch.Tensor) -> torch.Tensor:
    """Returns the four signed bytes of each number, lowest first, padded with zeros as cuBLAS requires.

    Adding 128 to each byte but the highest carries into the next byte wherever a byte is 128 or more. Flipping the
    highest bit of each of these bytes subtracts 128 again. The last carry overflows the 32 bits, which only drops a
    multiple of 2^32.

    Args:
        rows: int32, shape (num_rows, d).

    Returns:
        int8, shape (4, max(num_rows, `_LEAST_ROWS`), d rounded up to a multiple of 8), contiguous.
    """
    num_rows, d = rows.shape
    shape = 4, max(num_rows, _LEAST_ROWS), _up(d)
    make = torch.empty if shape == (4, num_rows, d) else torch.zeros
    limbs = make(shape, dtype=torch.int8, device=rows.device)
    turned = (rows + _HALF_STEPS).bitwise_xor_(_HALF_STEPS).contiguous()
    # little-endian: (num_rows, d) -> (num_rows, d, 4)
    each = turned.reshape(-1).view(torch.int8).view(num_rows, d, 4)
    for index in range(4):
        limbs[index, :num_rows, :d].copy_(each[:, :, index])
    return limbs


# The weight


def prepared(weight: torch.Tensor) -> torch.Tensor:
    """Returns the weight as `torch._int_mm` requires it, padded with zeros: the weight itself, or a copy that is kept
    as long as the weight lives.

    A change through `.data`, or in place to an inference tensor, is not noticed. No code of this project changes a
    weight.
    """
    if _lies_right(weight):
        return weight
    version = 0 if weight.is_inference() else weight._version  # Inference tensors have no version.
    with _lock:
        kept: tuple[int, torch.Tensor] | None = _copies.get(weight)
        if kept is None or kept[0] != version:
            kept = _copies[weight] = version, _copy(weight)
    return kept[1]


def _lies_right(weight: torch.Tensor) -> bool:
    d, m = weight.shape
    is_aligned = d % _MULTIPLE == m % _MULTIPLE == weight.data_ptr() % _ALIGNED_BYTES == 0
    return is_aligned and weight.t().is_contiguous()


def _copy(weight: torch.Tensor) -> torch.Tensor:
    d, m = weight.shape
    with torch.inference_mode(False):  # The copy is kept, and later calls may run outside inference mode.
        turned = torch.zeros(_up(m), _up(d), dtype=torch.int8, device=weight.device)
        turned[:m, :d].copy_(weight.t())
    return turned.t()


def _up(width: int) -> int:
    return -(-width // _MULTIPLE) * _MULTIPLE


# The self-test

_TESTED = ((1, 8, 8), (3, 40, 24), (17, 100, 30), (70, 2048, 64), (300, 640, 264))
"""The shapes (num_rows, d, m) that the self-test multiplies: few rows and many, with and without padding."""


@functools.cache
def is_exact(device: torch.device) -> bool:
    """Tells whether the private `torch._int_mm` multiplies int8 exactly on a device. The result is computed once for
    each device.

    Args:
        device: a tensor's own device, which includes its index.

    Returns:
        True if every tested product was exact; False otherwise, and if torch refuses the operation, as on GPUs without
        int8 units.
    """
    try:
        return all(_is_exact_for(*shape, device) for shape in _TESTED)
    except (RuntimeError, AttributeError):
        return False


def _is_exact_for(num_rows: int, d: int, m: int, device: torch.device) -> bool:
    """Tells whether products of random and extreme numbers on the device equal those of int64 arithmetic on the CPU.
    The extreme numbers reveal a kernel that saturates."""
    generator = torch.Generator().manual_seed(d)
    rows = torch.randint(-(2**31), 2**31, (num_rows, d), generator=generator, device="cpu").to(torch.int32)
    rows[::3], rows[1::3] = 0x7F7F7F7F, 0x7F7F7F80  # All limbs are 127, or all are -128.
    weight = torch.randint(-128, 128, (d, m), generator=generator, device="cpu").to(torch.int8)
    weight[:, ::3], weight[:, 1::3] = -128, 127
    exact = (rows.to(torch.int64) @ weight.to(torch.int64)).to(torch.int32)  # The conversion keeps the low 32 bits.
    layouts = weight.to(device), weight.t().contiguous().to(device).t()
    return all(torch.equal(product(rows.to(device), each).to("cpu"), exact) for each in layouts)
