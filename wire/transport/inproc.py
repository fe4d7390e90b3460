"""A provider in the same process: the same calls and checks, no network and no privacy boundary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from wire.errors import InvalidTensor
from wire.frame import ITEM_BYTES, Call, check_rows, row_of
from wire.manifest import Manifest
from wire.ring.seeded_rows import PACKED_BYTES, Rows, SeededRows, count_rows
from wire.ring.threads import all_cores
from wire.transport.connection import Pending, Traffic


class Handler(Protocol):
    """What an embedded provider offers to this transport."""

    def manifest(self) -> Manifest:
        """As over the wire."""
        ...

    def read_file(self, file_name: str) -> Iterator[bytes]:
        """As over the wire."""
        ...

    def compute(self, call: Call, rows: Rows) -> torch.Tensor:
        """One product; blocks."""
        ...


@dataclass(frozen=True)
class _Done:
    reply: torch.Tensor

    def result(self) -> torch.Tensor:
        """The reply, already there."""
        return self.reply


class InprocConnection:
    """Calls a `Handler` directly, in the caller's thread."""

    def __init__(self, handler: Handler) -> None:
        """Args: handler: the embedded provider; the connection does not own it."""
        self._handler = handler
        self.traffic = Traffic()

    def manifest(self) -> Manifest:
        """The handler's manifest."""
        return self._handler.manifest()

    def fetch(self, file_name: str) -> Iterator[bytes]:
        """The chunks of one bundle file."""
        return self._handler.read_file(file_name)

    def submit(self, call: Call, rows: Rows | bytearray, reply_cols: int) -> Pending:
        """Computes at once; raises what the provider raises."""
        if isinstance(rows, bytearray):
            rows = row_of(call, rows)
        check_rows(call, rows)
        with all_cores():  # a provider's own: nothing is waited for meanwhile
            reply = self._handler.compute(call, rows)
        num_rows = count_rows(rows)
        if reply.shape != (num_rows, reply_cols):
            raise InvalidTensor(f"expected {reply_cols} outputs a row, got {reply.shape[1]}")
        up = PACKED_BYTES if isinstance(rows, SeededRows) else rows.numel() * ITEM_BYTES
        self.traffic.add(up, reply.numel() * ITEM_BYTES, 1)
        return _Done(reply)

    def close(self) -> None:
        """Nothing to end."""
