"""What a tenant sends in one request: rows, the seed of rows, or one row that already lies in its message.

Guarantees: a payload gives the same bytes however often it is sent, so that a retry shows no other rows; and it shows
no numbers when it is printed. A mask makes payloads, a connection sends them, and neither asks which kind it has.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from wire import frame
from wire.errors import InvalidTensor
from wire.frame import HEADER_BYTES, ITEM_BYTES, Call, Header, Purpose
from wire.limits import CHUNK_BYTES
from wire.ring.seeded_rows import PACKED_BYTES, Rows, SeededRows


class Payload(Protocol):
    """The content of one request."""

    @property
    def num_rows(self) -> int:
        """How many rows are asked about."""
        ...

    @property
    def cols(self) -> int:
        """How many numbers each of these rows has."""
        ...

    @property
    def num_bytes(self) -> int:
        """How many bytes cross the wire, without headers."""
        ...

    def check(self, call: Call) -> None:
        """Raises `InvalidTensor` where this content does not suit the call."""
        ...

    def rows(self, call: Call) -> Rows:
        """Returns what the provider will read: int32 or float32 rows on the CPU, shape (num_rows, cols), not copied; or
        their seed."""
        ...

    def frames(self, header: Header) -> Iterable[bytes | memoryview]:
        """Returns the frames to send, in order.

        Args:
            header: the header of the whole request, whose `total_bytes` is `num_bytes`.
        """
        ...


class RowsPayload:
    """Rows as a tensor. They must not change until the reply is there."""

    __slots__ = ("_rows", "cols", "num_bytes", "num_rows")

    def __init__(self, rows: torch.Tensor) -> None:
        """Args: rows: shape (num_rows, cols), in the dtype of the call's arithmetic, on any device."""
        if rows.dim() != 2:
            raise InvalidTensor(f"expected a matrix, got a tensor with {rows.dim()} dimensions")
        self._rows = rows.to("cpu").contiguous()
        self.num_rows, self.cols = rows.shape
        self.num_bytes = rows.numel() * ITEM_BYTES

    def check(self, call: Call) -> None:
        """See `Payload.check`: the dtype must be that of the call's arithmetic."""
        frame.check_rows(call, self._rows)

    def rows(self, call: Call) -> torch.Tensor:
        """See `Payload.rows`."""
        return self._rows

    def frames(self, header: Header) -> Iterable[bytes | memoryview]:
        """See `Payload.frames`."""
        return frame.frames(header, frame.tensor_bytes(self._rows))


class SeedPayload:
    """The seed of rows, which the provider makes itself."""

    __slots__ = ("_seeded", "cols")

    num_bytes = PACKED_BYTES

    def __init__(self, seeded: SeededRows, cols: int) -> None:
        """Args: seeded: which rows; cols: the width at which the provider makes them, which a seed does not say."""
        self._seeded, self.cols = seeded, cols

    @property
    def num_rows(self) -> int:
        """See `Payload.num_rows`."""
        return self._seeded.num_rows

    def check(self, call: Call) -> None:
        """See `Payload.check`: only a call for a hint carries a seed."""
        frame.check_rows(call, self._seeded)

    def rows(self, call: Call) -> SeededRows:
        """See `Payload.rows`."""
        return self._seeded

    def frames(self, header: Header) -> Iterable[bytes | memoryview]:
        """See `Payload.frames`."""
        return frame.frames(header, memoryview(self._seeded.pack()))


class MessagePayload:
    """One row that was written where it will be sent from: a decode step sends a hundred, and each copy costs."""

    __slots__ = ("_message", "cols", "num_bytes", "numbers")

    num_rows = 1

    def __init__(self, cols: int) -> None:
        """Makes room for a row of four-byte numbers and for the header in front of it.

        Args:
            cols: how many numbers the row has; `fits` says how many may be sent so.

        Attributes:
            numbers: the row's bytes, for the mask to write.
        """
        self.cols = cols
        self.num_bytes = cols * ITEM_BYTES
        self._message = bytearray(HEADER_BYTES + self.num_bytes)
        self.numbers = memoryview(self._message)[HEADER_BYTES:]

    @staticmethod
    def fits(cols: int) -> bool:
        """Tells whether a row of so many numbers fits one frame."""
        return cols * ITEM_BYTES <= CHUNK_BYTES

    def check(self, call: Call) -> None:
        """See `Payload.check`: a call for a hint carries a seed."""
        if call.purpose is Purpose.HINT:
            raise InvalidTensor("expected a seed with a call for a hint")

    def rows(self, call: Call) -> torch.Tensor:
        """See `Payload.rows`."""
        return torch.frombuffer(self.numbers, dtype=frame.DTYPES[call.arithmetic]).view(1, self.cols)

    def frames(self, header: Header) -> Iterable[bytes | memoryview]:
        """See `Payload.frames`: the one frame is this memory, and its header is written here."""
        self._message[:HEADER_BYTES] = header.pack()
        return (memoryview(self._message),)
