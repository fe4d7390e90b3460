"""Moves rows to a device and products back, on a stream of its own, through staging buffers in pinned memory.

Guarantees: a block of rows is copied to the device once and its product is copied back once. Rows and replies that are
on the device, in memory that a tenant shares, are copied there and cross nothing. A lane holds one block at a time. Two
lanes that take turns let the copies of one block overlap with the product of another. On torch's `cpu` device there are
no streams, and a lane computes a block at once.
"""

from __future__ import annotations

import contextlib
import itertools
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
        self.block: Sequence[RowsAndReply] = ()
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
        reply, height, places = block[0][1], max(count, num_padded), _places(block)
        if all(self._is_here(rows) for rows, _ in block):
            here = self._staged(block, places, height)
            back = self.reply.view(count, reply.shape[1], reply.dtype)
            with self.current():
                self._there = here.to(self.device, non_blocking=True)
                back.copy_(multiply(self._there)[:count], non_blocking=True)
        else:
            self._start_mixed(block, places, multiply, height)
        self.block = block

    def _staged(self, block: Sequence[RowsAndReply], places: list[slice], height: int) -> torch.Tensor:
        """Copies the rows that have to cross into the staging buffer, each to its place in the block; returns it."""
        first = block[0][0]
        here = self.rows.view(height, first.shape[1], first.dtype)
        for (rows, _), place in zip(block, places, strict=True):
            if self._is_here(rows):
                here[place].copy_(rows)
        here[places[-1].stop :].zero_()
        return here

    def _start_mixed(self, block: Sequence[RowsAndReply], places: list[slice], multiply: Multiply, height: int) -> None:
        """Starts a product of which some rows are on the device: those are copied there, on the lane's stream."""
        first, reply = block[0]
        back = self.reply.view(places[-1].stop, reply.shape[1], reply.dtype)
        here = self._staged(block, places, height)
        with self.current():
            there = self._there = torch.empty(height, first.shape[1], dtype=first.dtype, device=self.device)
            there[places[-1].stop :].zero_()
            for (rows, _), place in zip(block, places, strict=True):
                there[place].copy_(here[place] if self._is_here(rows) else rows, non_blocking=True)
            product = multiply(there)
            for (_, mine), place in zip(block, places, strict=True):
                (back[place] if self._is_here(mine) else mine).copy_(product[place], non_blocking=True)

    def finish(self) -> None:
        """Waits for the product of the block that was started, if there is one, and writes it to the block's memory."""
        block, self.block = self.block, ()
        if not block:
            return
        self.synchronize()
        places, (_, first) = _places(block), block[0]
        back = self.reply.view(places[-1].stop, first.shape[1], first.dtype)
        for (_, reply), place in zip(block, places, strict=True):
            if self._is_here(reply):
                reply.copy_(back[place])
        self._there = None

    def synchronize(self) -> None:
        """Waits until the device has done what was started on this lane."""
        if self._stream is not None:
            self._stream.synchronize()

    def drop(self) -> None:
        """Gives up the block that was started, and waits until the device no longer uses the staging buffers. An error
        of a lost device is ignored, since nothing in its memory is used again."""
        with contextlib.suppress(RuntimeError):  # The memory is let go only after the device has stopped using it.
            self.synchronize()
        self.block, self._there = (), None


def _places(block: Sequence[RowsAndReply]) -> list[slice]:
    """Returns the rows of a block that each of its pairs has."""
    ends = list(itertools.accumulate(rows.shape[0] for rows, _ in block))
    return [slice(end - rows.shape[0], end) for (rows, _), end in zip(block, ends, strict=True)]


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
