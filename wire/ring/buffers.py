"""Keeps the memory of large messages and uses it again.

Fresh pages are not free: a virtual machine was measured to spend 5 µs on each, more than on the copy that fills it, and
a fine-tuning step of 2 × 256 tokens moves a gigabyte. malloc keeps freed blocks of this size only by chance.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np
import numpy.typing as npt
import torch

_LEAST_BITS, _MOST_BITS = 17, 24
"""Base-two logarithms of the buffer sizes that are kept: from 128 KiB, for what is larger than 64 KiB, to 16 MiB.
malloc has room in its heap for what is smaller; what is larger is mapped for one use."""

_KEPT_BYTES = 16 << 20
"""Most bytes kept for each power of two, so at most 128 MiB of a process, which keeps them to its end. A step of
SmolLM2 uses three sizes."""

_free: dict[int, deque[npt.NDArray[np.uint8]]] = {
    bits: deque(maxlen=_KEPT_BYTES >> bits) for bits in range(_LEAST_BITS, _MOST_BITS + 1)
}
"""Free buffers by the logarithm of their size. A full deque drops its oldest. There is no lock, since the garbage
collector may give a buffer back in a thread that holds it; a deque's append and pop are atomic by themselves."""
_lent: dict[int, weakref.ref[npt.NDArray[np.uint8]]] = {}
"""The weak references of lent buffers; a reference must live for its callback to be called. Setting and popping a key
are atomic, too."""


def unwritten(num_bytes: int) -> memoryview:
    """Returns writable bytes with any content, another tenant's rows too: the caller writes all of them before they are
    read.

    They are not zeroed: a frame of 49 bytes must not cost the time of 64 MiB of zeros. A buffer is given back by itself
    when the last view or tensor of it is gone.
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

    # `weakref.finalize` would do as much, but calls what is left at the end of the process, while other threads still
    # write.
    ref = weakref.ref(lent, give_back)
    _lent[id(ref)] = ref
    # Views of `lent.data` keep `lent` alive; those that numpy would make of `lent` itself would keep only `memory`.
    return lent.data


def unwritten_tensor(num_rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Does what `torch.empty((num_rows, cols))` does on the CPU, in memory from `unwritten`; what that says holds here
    too."""
    size = num_rows * cols * dtype.itemsize
    if size <= 1 << (_LEAST_BITS - 1):
        return torch.empty(num_rows, cols, dtype=dtype, device="cpu")
    return torch.frombuffer(unwritten(size), dtype=dtype).view(num_rows, cols)
