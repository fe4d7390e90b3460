"""This module keeps the memory of large messages and reuses it.

Fresh pages of memory cost time. On a virtual machine, each fresh page took 5 µs, which is longer than it takes to copy
data into the page. A fine-tuning step of 2 × 256 tokens moves a gigabyte, and malloc keeps freed blocks of this size
only by chance.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt
import torch

_LEAST_BITS, _MOST_BITS = 17, 24
"""The base-two logarithms of the smallest and the largest buffer that is kept. Buffers of 128 KiB serve messages above
64 KiB; malloc has room in its heap for smaller ones. The largest buffers have 16 MiB; memory for a larger message is
mapped for one use."""

_KEPT_BYTES = 16 << 20
"""The most bytes of free buffers kept for each buffer size, which is a power of two. A process therefore keeps at most
128 MiB, until it ends. A step of SmolLM2 uses three sizes."""

_free: dict[int, deque[npt.NDArray[np.uint8]]] = {
    bits: deque(maxlen=_KEPT_BYTES >> bits) for bits in range(_LEAST_BITS, _MOST_BITS + 1)
}
"""Maps the logarithm of a size to the free buffers of that size. A full deque drops its oldest buffer. There is no
lock, since the garbage collector may return a buffer in a thread that already holds the lock. A deque's append and pop
are atomic by themselves."""
_lent: dict[int, weakref.ref[npt.NDArray[np.uint8]]] = {}
"""Holds the weak references to lent buffers, since a reference must live for its callback to be called. Setting and
popping a key are atomic, so this needs no lock."""


def unwritten(num_bytes: int) -> memoryview:
    """Returns writable bytes with any content, possibly another tenant's rows: the caller must write every byte before
    any is read.

    The bytes are not zeroed, so that a frame of 49 bytes that announces 64 MiB does not cost the time to zero them. A
    buffer of more than 64 KiB and at most 16 MiB returns to this module when its last view or tensor is gone.
    """
    bits = max(0, num_bytes - 1).bit_length()
    if not _LEAST_BITS <= bits <= _MOST_BITS:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu").numpy().data
    free = _free[bits]
    try:
        memory = free.pop()
    except IndexError:
        memory = np.empty(1 << bits, dtype=np.uint8)
    lent = memory[:num_bytes]

    def give_back(ref: weakref.ref[npt.NDArray[np.uint8]]) -> None:
        _lent.pop(id(ref), None)
        free.append(memory)

    # `weakref.finalize` would do the same, but at the end of the process it would return the buffers that other threads
    # still write to.
    ref = weakref.ref(lent, give_back)
    _lent[id(ref)] = ref
    # Views of `lent.data` keep `lent` alive. Views that numpy makes of `lent` itself would keep only `memory` alive.
    return lent.data


def unwritten_like(other: torch.Tensor, num_rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor of shape (num_rows, cols) with any content, on the device of `other`; see `unwritten_tensor`."""
    if other.is_cpu:
        return unwritten_tensor(num_rows, cols, dtype)
    return torch.empty(num_rows, cols, dtype=dtype, device=other.device)


def unwritten_tensor(num_rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns a CPU tensor of shape (num_rows, cols) with any content, in memory from `unwritten` if it is large. The
    caller must write every number before any is read."""
    size = num_rows * cols * dtype.itemsize
    if size <= 1 << (_LEAST_BITS - 1):
        return torch.empty(num_rows, cols, dtype=dtype, device="cpu")
    return torch.frombuffer(unwritten(size), dtype=dtype).view(num_rows, cols)
