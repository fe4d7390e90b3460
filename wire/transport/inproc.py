"""This module connects a tenant to a provider in the same process. Calls and checks are the same, but there is no
network and no privacy boundary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.threads import all_cores
from wire.errors import InvalidTensor, NotPermitted, UnknownLayer
from wire.frame import Call, FrameType, payload_bytes
from wire.manifest import GroupInfo, Manifest
from wire.payload import Payload
from wire.ring.seeded_rows import Rows
from wire.ring.widths import rounded
from wire.transport.connection import NO_WEIGHTS, Pending, Traffic
from wire.usage import StreamTokens


class Handler(Protocol):
    """Defines the methods of an embedded provider (one in the tenant's process) that this transport calls."""

    def manifest(self) -> Manifest:
        """Returns the manifest that the provider would send over the wire."""
        ...

    def read_file(self, file_name: str) -> Iterator[bytes]:
        """Yields the chunks of one bundle file, as they would cross the wire."""
        ...

    def read_weights(self, group: int) -> Iterator[bytes]:
        """Returns the chunks of a group's weight, as they would cross the wire; raises UnknownLayer if there is
        none."""
        ...

    def compute(self, call: Call, rows: Rows) -> torch.Tensor:
        """Computes one product and returns it."""
        ...


@dataclass(frozen=True)
class _Done:
    reply: torch.Tensor

    def result(self) -> torch.Tensor:
        return self.reply


class InprocConnection:
    """Calls a `Handler` directly, in the caller's thread."""

    def __init__(self, handler: Handler, device: torch.device | None = None) -> None:
        """Keeps the handler of the embedded provider, which `close` does not close.

        Args:
            handler: the embedded provider.
            device: where it computes, if not on the CPU: rows that are there are not copied, and their product stays.
        """
        self._handler, self._device = handler, device
        self.traffic, self._tokens = Traffic(), StreamTokens()

    def manifest(self) -> Manifest:
        return self._handler.manifest()

    def fetch(self, file_name: str) -> Iterator[bytes]:
        return self._handler.read_file(file_name)

    def fetch_weights(self, group: GroupInfo) -> Iterator[bytes]:
        """Yields the chunks of a group's weight; see `Connection.fetch_weights`."""
        try:
            chunks = self._handler.read_weights(group.id)
        except UnknownLayer:
            raise NotPermitted(NO_WEIGHTS) from None
        received = 0
        for chunk in chunks:
            received += len(chunk)
            yield chunk
        self.traffic.add(down=received)
        self.traffic.usage.fetched(received)

    def submit(self, call: Call, payload: Payload, reply_cols: int) -> Pending:
        """Computes the product at once; raises the errors that the provider raises."""
        payload.check(call)
        with all_cores():  # A provider elsewhere would use all its cores too, and this thread only waits.
            there = None if self._device is None else payload.rows_on(self._device)
            reply = self._handler.compute(call, payload.rows(call) if there is None else there)
        if reply.shape != (payload.num_rows, reply_cols):
            raise InvalidTensor(f"expected {reply_cols} outputs a row, got {reply.shape[1]}")
        sent, came = (
            payload_bytes(kind, call, payload.num_rows, cols)
            for kind, cols in ((FrameType.REQUEST, payload.cols), (FrameType.REPLY, reply_cols))
        )
        self.traffic.add(sent, came, 1)
        self.traffic.answered(call, payload.num_rows, sent, came, self._tokens)
        # A product of shortened rows is exact, and only a reply that has fewer bits than they have is rounded.
        return _Done(reply if call.reply_bits == call.bits else rounded(reply, call.reply_bits))

    def reconnect(self) -> None:
        """Does nothing, since there is no connection that could break."""

    def close(self) -> None:
        """Does nothing, since there is no connection to end."""
