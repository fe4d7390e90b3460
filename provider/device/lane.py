"""Moves rows to a device and products back, on a stream of its own, through staging buffers in pinned memory.

Guarantees: a block of rows is copied to the device once and its product is copied back once. A lane holds one block at
a time. Two lanes that take turns let the copies of one block overlap with the product of another. On torch's `cpu`
device there are no streams, and a lane computes a block at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from wire.frame import ITEM_BYTES
from wire.ring.pieces import RowsAndReply

Multiply = Callable[[torch.Tensor], torch.Tensor]
"""A function that maps rows on a device to their product on that device."""


class Lane:
    """Holds a stream, and the staging buffers for the rows and the reply of one block."""

    def __init__(self, device: torch.device) -> None:
        """Makes a lane of a device, without any staging memory yet.

        Args:
            device: a CUDA device, or torch's `cpu`.
        """
        self.device = device
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self.rows, self.reply = Staging(is_cuda), Staging(is_cuda)
        self._block: Sequence[RowsAndReply] = ()
        self._there: torch.Tensor | None = None

    def current(self) -> AbstractContextManager[object]:
        """Returns a context in which torch's operations run on this lane's stream."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def start(self, block: Sequence[RowsAndReply], multiply: Multiply, num_padded: int = 0) -> None:
        """Finishes the block that was started before, if there is one, and starts the product of a block of rows.

        Args:
            block: pairs of rows and memory for their product, all of the same widths, on the CPU.
            multiply: computes the product of rows on the device.
            num_padded: rows of zeros are appended to the block up to this number of rows.
        """
        self.finish()
        count = sum(rows.shape[0] for rows, _ in block)
        (first, reply), height = block[0], max(count, num_padded)
        here = self.rows.view(height, first.shape[1], first.dtype)
        place = 0
        for rows, _ in block:
            here[place : place + rows.shape[0]].copy_(rows)
            place += rows.shape[0]
        here[count:].zero_()
        back = self.reply.view(count, reply.shape[1], reply.dtype)
        with self.current():
            self._there = here.to(self.device, non_blocking=True)
            back.copy_(multiply(self._there)[:count], non_blocking=True)
        self._block = block

    def finish(self) -> None:
        """Waits for the product of the block that was started, if there is one, and writes it to the block's memory."""
        block, self._block = self._block, ()
        if not block:
            return
        self.synchronize()
        count = sum(rows.shape[0] for rows, _ in block)
        _, first = block[0]
        back, place = self.reply.view(count, first.shape[1], first.dtype), 0
        for _, reply in block:
            reply.copy_(back[place : place + reply.shape[0]])
            place += reply.shape[0]
        self._there = None

    def synchronize(self) -> None:
        """Waits until the device has done what was started on this lane."""
        if self._stream is not None:
            self._stream.synchronize()

    def drop(self) -> None:
        """Gives up the block that was started, and waits until the device no longer uses the staging buffers. An error
        of a lost device is ignored, since nothing in its memory is used again."""
        self._block, self._there = (), None
        with contextlib.suppress(RuntimeError):
            self.synchronize()


class Staging:
    """Holds memory through which rows pass on their way to or from a device. It grows to the largest use."""

    def __init__(self, is_pinned: bool) -> None:
        """Makes an empty buffer. `is_pinned` says whether the device reads it directly, in copies that overlap with
        other work."""
        self._is_pinned = is_pinned
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def view(self, num_rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns a matrix in this memory, with any content; `dtype` must have four bytes. Every call returns the same
        memory, until one asks for more."""
        size = num_rows * cols * ITEM_BYTES
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._is_pinned)
        return self._memory[:size].view(dtype).view(num_rows, cols)
