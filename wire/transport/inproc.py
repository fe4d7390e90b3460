"""A provider in the same process: the same calls and checks, but no network and no privacy boundary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from wire.errors import InvalidTensor
from wire.frame import ITEM_BYTES, Call
from wire.manifest import Manifest
from wire.payload import Payload
from wire.ring.seeded_rows import Rows
from wire.ring.threads import all_cores
from wire.transport.connection import Pending, Traffic


class Handler(Protocol):
    """What an embedded provider offers to this transport."""

    def manifest(self) -> Manifest:
        """Returns the same manifest as over the wire."""
        ...

    def read_file(self, file_name: str) -> Iterator[bytes]:
        """Yields the same chunks as over the wire."""
        ...

    def compute(self, call: Call, rows: Rows) -> torch.Tensor:
        """Computes one product and returns when it is done."""
        ...


@dataclass(frozen=True)
class _Done:
    reply: torch.Tensor

    def result(self) -> torch.Tensor:
        """Returns the reply, which is there already."""
        return self.reply


class InprocConnection:
    """Calls a `Handler` directly, in the caller's thread."""

    def __init__(self, handler: Handler) -> None:
        """Args: handler: the embedded provider; the connection does not own it."""
        self._handler = handler
        self.traffic = Traffic()

    def manifest(self) -> Manifest:
        """Returns the handler's manifest."""
        return self._handler.manifest()

    def fetch(self, file_name: str) -> Iterator[bytes]:
        """Yields the chunks of one bundle file."""
        return self._handler.read_file(file_name)

    def submit(self, call: Call, payload: Payload, reply_cols: int) -> Pending:
        """Computes at once, and raises what the provider raises."""
        payload.check(call)
        with all_cores():  # The provider would use all cores too, and this thread waits for nothing else meanwhile.
            reply = self._handler.compute(call, payload.rows(call))
        if reply.shape != (payload.num_rows, reply_cols):
            raise InvalidTensor(f"expected {reply_cols} outputs a row, got {reply.shape[1]}")
        self.traffic.add(payload.num_bytes, reply.numel() * ITEM_BYTES, 1)
        return _Done(reply)

    def close(self) -> None:
        """Does nothing, since there is no connection to end."""
