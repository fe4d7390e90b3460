"""Makes memory that is followed by a page that may not be read. If code reads or writes past the end, the process
ends."""

from __future__ import annotations

import ctypes
import mmap

import torch


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor whose last byte is followed by a page that may not be read or written."""
    page = mmap.PAGESIZE
    size = -(-tensor.numel() * tensor.itemsize // page) * page
    area = mmap.mmap(-1, size + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(start + size), page, 0) == 0
    count, width = tensor.numel(), tensor.itemsize
    copy = torch.frombuffer(area, dtype=tensor.dtype, count=count, offset=size - count * width)
    return copy.view(tensor.shape).copy_(tensor)
