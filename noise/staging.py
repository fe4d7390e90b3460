"""This module moves private rows between a device and the CPU through pinned memory, and overwrites the copies
afterwards.

The driver copies to and from a pinned buffer directly, without a buffer of its own. torch keeps pinned buffers for
later use, so the rows in a buffer are overwritten before the buffer is released. Rows that are on the CPU and stay
there pass through no buffer. Of GPUs this was run on one H100.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def is_here(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is on the CPU."""
    return tensor.is_cpu


def staging_buffer(like: torch.Tensor) -> torch.Tensor:
    """Returns an uninitialised tensor on the CPU, of the shape and dtype of `like`. It is in pinned memory if CUDA is
    available."""
    is_pinned = torch.cuda.is_available()
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=is_pinned)


@contextlib.contextmanager
def on_host(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Gives private rows of any device on the CPU, and overwrites their copy afterwards.

    Yields:
        `rows` itself if it is on the CPU, else a copy that is valid inside the context.
    """
    if is_here(rows):
        yield rows
        return
    here = staging_buffer(rows)
    try:
        yield here.copy_(rows)
    finally:
        here.zero_()


def to_host(rows: torch.Tensor, out: torch.Tensor) -> None:
    """Copies private rows of any device to `out`, on the CPU, of the same shape and any strides."""
    with on_host(rows) as here:
        out.copy_(here)


@contextlib.contextmanager
def on_device(rows: torch.Tensor, device: torch.device) -> Iterator[torch.Tensor]:
    """Gives private rows of the CPU on a device, and overwrites their copies afterwards.

    Yields:
        `rows` itself if it is on that device, else a copy that is valid inside the context.
    """
    if rows.device == device and (is_here(rows) or device.type != "cpu"):
        yield rows
        return
    if not rows.is_cpu:
        with on_host(rows) as crossed:
            yield crossed if device.type == "cpu" else crossed.to(device)
        return
    here = staging_buffer(rows)
    there = here.copy_(rows).to(device, copy=True)  # This waits for the copy, so that the buffer may be overwritten.
    here.zero_()
    try:
        yield there
    finally:
        there.zero_()
