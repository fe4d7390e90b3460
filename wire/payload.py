"""This module defines what a tenant sends in one request: rows, a seed that is expanded into rows, or one row that was
written directly into the bytes to send.

Guarantees: a payload gives the same bytes each time it is sent, so a retry shows the provider nothing new. Printing a
payload shows no numbers. A connection sends a payload without knowing which of the three kinds it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from wire import frame
from wire.errors import InvalidTensor
from wire.frame import HEADER_BYTES, ITEM_BYTES, Call, Header, Purpose
from wire.limits import CHUNK_BYTES
from wire.ring import widths
from wire.ring.seeded_rows import Rows, SeededRows
from wire.ring.widths import FULL_BITS, row_bytes


class Payload(Protocol):
    """Defines the interface of a payload, the content of one request."""

    @property
    def num_rows(self) -> int:
        """Returns how many rows the provider multiplies for the request."""
        ...

    @property
    def cols(self) -> int:
        """Returns how many numbers each row has."""
        ...

    @property
    def masked_rows(self) -> torch.Tensor | None:
        """Returns the rows if they are masked ring numbers, which may lie in memory that the provider shares; else
        None."""
        ...

    def check(self, call: Call) -> None:
        """Raises `InvalidTensor` if this content does not suit the call."""
        ...

    def rows(self, call: Call) -> Rows:
        """Returns what the provider will read: rows, int32 or float32, on the CPU, shape (num_rows, cols), not copied;
        or the seed of rows."""
        ...

    def rows_on(self, device: torch.device) -> torch.Tensor | None:
        """Returns the rows if they are on that device, so that they need not cross to the CPU; else None."""
        ...

    def frames(self, header: Header) -> Iterable[bytes | memoryview]:
        """Returns the frames to send, in order.

        Args:
            header: the header of the whole request. Its call says how many bits each number has.
        """
        ...


class RowsPayload:
    """Holds rows as a tensor. The rows must not change until the reply has come."""

    __slots__ = ("_here", "_is_masked", "_rows", "cols", "num_rows")

    def __init__(self, rows: torch.Tensor, is_masked: bool = False) -> None:
        """Keeps `rows`. Rows that are not contiguous are copied, and rows of another device than the CPU cross when
        they are first read.

        Args:
            rows: shape (num_rows, cols), in the dtype of the call's arithmetic. Ring numbers must have been rounded to
                the call's width (`wire.ring.widths.rounded`).
            is_masked: whether a mask hides each number of the rows.

        Raises:
            InvalidTensor: `rows` is not a matrix.
        """
        if rows.dim() != 2:
            raise InvalidTensor(f"expected a matrix, got a tensor with {rows.dim()} dimensions")
        self._rows = rows.contiguous()
        self._here: torch.Tensor | None = self._rows if rows.is_cpu else None
        self.num_rows, self.cols = rows.shape
        self._is_masked = is_masked

    @property
    def masked_rows(self) -> torch.Tensor | None:
        """Returns the rows, where they are, if they were said to be masked, and are ring numbers; see
        `Payload.masked_rows`."""
        return self._rows if self._is_masked and self._rows.dtype == torch.int32 else None

    def check(self, call: Call) -> None:
        frame.check_rows(call, self._rows)

    def rows(self, call: Call) -> torch.Tensor:
        """Returns the rows that this payload holds, on the CPU; see `Payload.rows`."""
        if self._here is None:
            buffer = torch.empty(self._rows.shape, dtype=self._rows.dtype, device="cpu", pin_memory=self._rows.is_cuda)
            self._here = buffer.copy_(self._rows)  # A pinned buffer is filled by the device at full speed.
        return self._here

    def rows_on(self, device: torch.device) -> torch.Tensor | None:
        return self._rows if self._rows.device == device else None

    def frames(self, header: Header) -> Iterable[bytes | memoryview]:
        return frame.frames(header, frame.rows_bytes(self.rows(header.call), header.call.bits))


class SeedPayload:
    """Holds a seed, which the provider expands into rows."""

    __slots__ = ("_seeded", "cols")

    masked_rows = None

    def __init__(self, seeded: SeededRows, cols: int) -> None:
        """Keeps the seed that is sent in place of rows.

        Args:
            seeded: the seed and the range of rows to expand from it.
            cols: the number of columns to expand, which a seed does not state.
        """
        self._seeded, self.cols = seeded, cols

    @property
    def num_rows(self) -> int:
        return self._seeded.num_rows

    def check(self, call: Call) -> None:
        """Checks that the call is for a hint, since no other call carries a seed; see `Payload.check`."""
        frame.check_rows(call, self._seeded)

    def rows(self, call: Call) -> SeededRows:
        return self._seeded

    def rows_on(self, device: torch.device) -> None:
        """Returns None; see `Payload.rows_on`."""

    def frames(self, header: Header) -> Iterable[bytes | memoryview]:
        return frame.frames(header, frame.rows_bytes(self._seeded))


class MessagePayload:
    """Holds one row that a mask writes directly into the memory that is sent. A decode step sends about a hundred such
    rows, one in each request, so that copying them would take a noticeable part of its time."""

    __slots__ = ("_bits", "_message", "cols", "is_packed", "numbers", "packed")

    num_rows = 1
    masked_rows = None  # One row goes by the socket sooner.

    def __init__(self, cols: int, bits: int = FULL_BITS) -> None:
        """Allocates the memory of one frame: a header and a row.

        Args:
            cols: how many numbers the row has. Callers must first check `fits`.
            bits: how many bits of each number are sent, as the call says.

        Attributes:
            numbers: a view of the row's bytes, four for each number, which the mask writes to.
            packed: a view of the bytes that are sent, where numbers have fewer bits than 32; else None.
            is_packed: whether `packed` was written, by the mask or by `frames`.
        """
        self.cols, self._bits = cols, bits
        self._message = bytearray(HEADER_BYTES + row_bytes(cols, bits))
        # Numbers of 32 bits lie where they are sent; others are packed when that is done.
        whole = self._message if bits == FULL_BITS else bytearray(HEADER_BYTES + cols * ITEM_BYTES)
        self.numbers = memoryview(whole)[HEADER_BYTES:]
        self.packed = None if bits == FULL_BITS else memoryview(self._message)[HEADER_BYTES:]
        self.is_packed = False

    @staticmethod
    def fits(cols: int) -> bool:
        """Tells whether a row of `cols` four-byte numbers fits in one frame."""
        return cols * ITEM_BYTES <= CHUNK_BYTES

    def check(self, call: Call) -> None:
        """Checks that the call is not for a hint, which must carry a seed, and has the row's width; see
        `Payload.check`."""
        if call.purpose is Purpose.HINT or call.bits != self._bits:
            raise InvalidTensor("expected a seed with a call for a hint, and numbers of the call's width")

    def rows(self, call: Call) -> torch.Tensor:
        return torch.frombuffer(self.numbers, dtype=frame.DTYPES[call.arithmetic]).view(1, self.cols)

    def rows_on(self, device: torch.device) -> None:
        """Returns None; see `Payload.rows_on`."""

    def frames(self, header: Header) -> Iterable[bytes | memoryview]:
        """Writes the header into the message's memory, and a row of fewer bits behind it, and returns that memory as
        the one frame; see `Payload.frames`."""
        message = memoryview(self._message)
        message[:HEADER_BYTES] = header.pack()
        if self.packed is not None and not self.is_packed:
            widths.pack_row(self.numbers, self.cols, self._bits, self.packed)
            self.is_packed = True
        return (message,)
