"""The product mod 2^32 of int32 rows and int8 weights on an NVIDIA GPU, by its int8 matrix units.

Guarantees: exact mod 2^32 for all numbers, shapes and memory orders, on devices for which `is_exact`; on others
wire/ring/product.py takes its plain form. A number is four signed bytes, z ≡ Σ l_i · 2^(8i) mod 2^32, -128 <= l_i <=
127; those of all rows are stacked into one `torch._int_mm`, and its sums are shifted together. The product is that of
wire/SPEC.md, section 5.

cuBLAS asks three things of `torch._int_mm`: more than 16 rows, widths that are multiples of 8, and, where all kinds of
GPU are to take it, both operands contiguous along the inner width (pytorch/pytorch#169956). A weight that does not lie
so is copied once, and its copy is kept while the weight lives: one int8 copy for the forward direction, and none for
the backward one where widths are multiples of 8, since W̃ᵀ lies right as it is.

Everything here runs on a CPU too, where tests compare it with big integers. No GPU was at hand when it was written: no
number in it was chosen by measuring.
"""

from __future__ import annotations

import functools
import threading

import torch
from torch.utils.weak import WeakIdKeyDictionary

from wire.ring import int_mm

_MULTIPLE = 8
_ALIGNED_BYTES = 16
"""Bytes of which a weight's address must be a multiple, since int8 kernels load 16 at once. It is so for whatever torch
allocates, but a slice may begin elsewhere."""
_LEAST_ROWS = 8
"""Rows to which fewer are padded: they make 32 rows of limbs, above the 16 that cuBLAS asks for."""
_EXACT_INNER = 1 << 16
"""Inner width of one product, so that no sum of limbs leaves int32: 2^16 · 128 · 128 = 2^30. 2^17 - 1 would be the
most."""
_SCRATCH_BYTES = 512 << 20
"""Most bytes of limbs and sums for one block of rows: 6,553 rows where the weight is 4096 × 4096."""
_HALF_STEPS = 0x00808080
"""The int32 with 128 in each byte but the highest; see `_limbs`."""

_copies: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Maps a weight to its version and its copy."""
_lock = threading.Lock()


def product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Computes rows · weight mod 2^32, on a device for which `is_exact`.

    Args:
        rows: int32, shape (num_rows, d), any strides.
        weight: int8, shape (d, m), same device, any strides. The same tensor, unchanged, is prepared once.

    Returns:
        int32, shape (num_rows, m), contiguous.
    """
    num_rows, (d, m) = rows.shape[0], weight.shape
    reply = torch.empty(num_rows, m, dtype=torch.int32, device=rows.device)
    if 0 in (num_rows, d, m):
        return reply.zero_()
    weight = _prepared(weight)
    step = max(_LEAST_ROWS, _SCRATCH_BYTES // (4 * weight.shape[0] + 16 * weight.shape[1]))
    for start in range(0, num_rows, step):
        _multiply(rows[start : start + step], weight, reply[start : start + step])
    return reply


def _multiply(rows: torch.Tensor, weight: torch.Tensor, reply: torch.Tensor) -> None:
    """Writes the product with a prepared weight, a piece of the inner width at a time."""
    num_rows, m = reply.shape
    for start in range(0, rows.shape[1], _EXACT_INNER):
        limbs = _limbs(rows[:, start : start + _EXACT_INNER])
        inner = limbs.shape[2]
        # (4, rows, inner) -> (4 · rows, inner)
        sums = int_mm.multiply(limbs.view(-1, inner), weight[start : start + inner])
        # (4 · rows, columns) -> (4, rows, columns) -> (4, num_rows, m)
        first, second, third, fourth = sums.view(4, -1, weight.shape[1])[:, :num_rows, :m]
        if start:
            reply.add_(first).add_(second, alpha=1 << 8)
        else:
            torch.add(first, second, alpha=1 << 8, out=reply)
        reply.add_(third, alpha=1 << 16).add_(fourth, alpha=1 << 24)  # int32 wraps mod 2^32.


def _limbs(rows: torch.Tensor) -> torch.Tensor:
    """Returns the signed bytes of each number, lowest first, padded with zeros as cuBLAS asks.

    Adding 128 to each byte but the highest carries into the next wherever a byte is 128 or more; turning the highest
    bit of each of these bytes over subtracts 128 again. The last carry leaves the 32 bits, and with it a multiple of
    2^32.

    Args:
        rows: int32, shape (num_rows, d).

    Returns:
        int8, shape (4, num_rows or `_LEAST_ROWS`, d up to a multiple of 8), contiguous.
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


def _prepared(weight: torch.Tensor) -> torch.Tensor:
    """Returns the weight as `torch._int_mm` wants it, padded with zeros: itself, or a copy that is kept while it lives.

    A change through `.data`, or in place to an inference tensor, is not noticed; nothing here changes a weight.
    """
    if _lies_right(weight):
        return weight
    version = 0 if weight.is_inference() else weight._version  # Inference tensors count no versions.
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
    with torch.inference_mode(False):  # The copy is kept, and later calls may be outside of inference mode.
        turned = torch.zeros(_up(m), _up(d), dtype=torch.int8, device=weight.device)
        turned[:m, :d].copy_(weight.t())
    return turned.t()


def _up(width: int) -> int:
    return -(-width // _MULTIPLE) * _MULTIPLE


# The self-test

_TESTED = ((1, 8, 8), (3, 40, 24), (17, 100, 30), (70, 2048, 64), (300, 640, 264))
"""Tested shapes (num_rows, d, m): few rows and many, padded and not."""


@functools.cache
def is_exact(device: torch.device) -> bool:
    """Tells whether the private `torch._int_mm` multiplies int8 exactly there; this is found once for each device.

    Args:
        device: a tensor's own device, so with its index.

    Returns:
        Whether it does; False too where it refuses, as on GPUs without int8 units.
    """
    try:
        return all(_is_exact_for(*shape, device) for shape in _TESTED)
    except (RuntimeError, AttributeError):
        return False


def _is_exact_for(num_rows: int, d: int, m: int, device: torch.device) -> bool:
    """Compares random numbers, and those that saturate whatever can saturate, with int64 on the CPU."""
    generator = torch.Generator().manual_seed(d)
    rows = torch.randint(-(2**31), 2**31, (num_rows, d), generator=generator, device="cpu").to(torch.int32)
    rows[::3], rows[1::3] = 0x7F7F7F7F, 0x7F7F7F80  # These have all limbs 127, and all limbs -128.
    weight = torch.randint(-128, 128, (d, m), generator=generator, device="cpu").to(torch.int8)
    weight[:, ::3], weight[:, 1::3] = -128, 127
    exact = (rows.to(torch.int64) @ weight.to(torch.int64)).to(torch.int32)  # The conversion keeps the low half.
    layouts = weight.to(device), weight.t().contiguous().to(device).t()
    return all(torch.equal(product(rows.to(device), each).to("cpu"), exact) for each in layouts)
