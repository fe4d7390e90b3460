"""Moves rows to a device and products back, on a stream of its own, through staging buffers in pinned memory.

Guarantees: a block of rows is copied to the device once and its product is copied back once. Rows and replies that are
on the device, in memory that a tenant shares, are copied there and cross nothing. A lane holds one block at a time. Two
lanes that take turns let the copies of one block overlap with the product of another. On torch's `cpu` device there are
no streams, and a lane computes a block at once.
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

    def __init__(self, device: torch.device, is_here: Callable[[torch.Tensor], bool] = lambda one: one.is_cpu) -> None:
        """Makes a lane of a device, without any staging memory yet.

        Args:
            device: a CUDA device, or torch's `cpu`.
            is_here: returns whether a tensor is in the CPU's memory and has to cross; on torch's `cpu` device, where
                all tensors are, tests may say otherwise.
        """
        self.device, self._is_here = device, is_here
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self.rows, self.reply = Staging(is_cuda), Staging(is_cuda)
        self.block: list[RowsAndReply] = []
        """The pairs of the block that was started whose rows and replies cross. Those on the device are in
        `_staying`."""
        self._staying: list[RowsAndReply] = []
        self._there: torch.Tensor | None = None

    def current(self) -> AbstractContextManager[object]:
        """Returns a context in which torch's operations run on this lane's stream."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def start(self, block: Sequence[RowsAndReply], multiply: Multiply, num_padded: int = 0) -> None:
        """Finishes the block that was started before, if there is one, and starts the product of a block of rows.

        Args:
            block: pairs of rows and memory for their product, all of the same widths; a pair is on the CPU or on the
                device.
            multiply: computes the product of rows on the device.
            num_padded: rows of zeros are appended to the block up to this number of rows.
        """
        self.finish()
        count = sum(rows.shape[0] for rows, _ in block)
        self.block = [pair for pair in block if self._is_here(pair[0])]
        self._staying = [pair for pair in block if not self._is_here(pair[0])]
        (first, reply), crossing = block[0], sum(rows.shape[0] for rows, _ in self.block)
        here = self.rows.view(crossing, first.shape[1], first.dtype)
        for (rows, _), part in zip(self.block, _parts(here, self.block), strict=True):
            part.copy_(rows)
        back = self.reply.view(crossing, reply.shape[1], reply.dtype)
        with self.current():
            height = max(count, num_padded)
            self._there = there = torch.empty(height, first.shape[1], dtype=first.dtype, device=self.device)
            there[:crossing].copy_(here, non_blocking=True)
            for (rows, _), part in zip(self._staying, _parts(there[crossing:count], self._staying), strict=True):
                part.copy_(rows, non_blocking=True)
            there[count:].zero_()
            product = multiply(there)
            back.copy_(product[:crossing], non_blocking=True)
            for (_, mine), part in zip(self._staying, _parts(product[crossing:count], self._staying), strict=True):
                mine.copy_(part, non_blocking=True)

    def finish(self) -> None:
        """Waits for the product of the block that was started, if there is one, and writes it to the block's memory."""
        if self._there is None:
            return
        self.synchronize()
        if self.block:
            first = self.block[0][1]
            back = self.reply.view(sum(rows.shape[0] for rows, _ in self.block), first.shape[1], first.dtype)
            for (_, reply), part in zip(self.block, _parts(back, self.block), strict=True):
                reply.copy_(part)
        self._let_go()

    def synchronize(self) -> None:
        """Waits until the device has done what was started on this lane."""
        if self._stream is not None:
            self._stream.synchronize()

    def drop(self) -> None:
        """Gives up the block that was started, and waits until the device no longer uses the staging buffers. An error
        of a lost device is ignored, since nothing in its memory is used again."""
        with contextlib.suppress(RuntimeError):  # The memory is let go only after the device has stopped using it.
            self.synchronize()
        self._let_go()

    def _let_go(self) -> None:
        self.block, self._staying, self._there = [], [], None


def _parts(stacked: torch.Tensor, pairs: Sequence[RowsAndReply]) -> Sequence[torch.Tensor]:
    """Returns the rows of each pair in a matrix that has the rows of all pairs, one pair after the other."""
    return stacked.split([rows.shape[0] for rows, _ in pairs]) if pairs else ()


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
