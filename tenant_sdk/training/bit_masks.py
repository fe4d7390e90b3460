"""This module stores one bit for each element of a tensor: whether dropout or ReLU let the element through.

Their gradients need no more than these bits."""

from __future__ import annotations

import torch

_WEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128)


def bits_of(flags: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's flags, eight in a byte.

    Args:
        flags: bool, any shape and device.

    Returns:
        uint8, shape (⌈number of flags / 8⌉,); missing flags at the end are False.
    """
    flat = flags.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    result = padded[:, 0].to(torch.uint8)
    for place in range(1, 8):
        result |= padded[:, place].to(torch.uint8) << place
    return result


def apply_bits(x: torch.Tensor, bits: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Returns x times a mask: elements whose bit is not set become zero.

    Args:
        x: any float dtype, shape and device.
        bits: the result of `bits_of` for a tensor of x's shape.
        scale: the number by which the elements that remain are divided. The mask is divided by it in x's dtype, as in
            torch's dropout. None stands for 1.
    """
    weights = torch.tensor(_WEIGHTS, dtype=torch.uint8, device=x.device)
    flags = (bits[:, None] & weights).ne(0).view(-1)[: x.numel()].view(x.shape)
    mask = flags.to(x.dtype)
    return x * (mask if scale is None else mask.div_(scale))


def keep_bits(x: torch.Tensor, p: float) -> torch.Tensor:
    """Draws at random which elements dropout keeps; the result is the one that torch's dropout would draw on a CPU.

    Args:
        x: the tensor that is dropped out.
        p: the probability with which an element is dropped.

    Returns:
        The bits of the elements that are kept, as `bits_of` gives them.

    Source: ATen's `_dropout_impl`, which draws `empty_like(input).bernoulli_(1 - p)`.
    """
    return bits_of(torch.empty_like(x).bernoulli_(1 - p) != 0)
