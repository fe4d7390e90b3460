"""Implements a client of the frame protocol that can send arbitrary bytes."""

from __future__ import annotations

import pytest
import torch

from tests.support.links import open_link
from tests.support.loopback_provider import Provider
from tests.support.ring_products import CALL
from wire import frame
from wire.errors import WireCode
from wire.frame import Arithmetic, Call, Direction, FrameType, Header

_NO_CALL = Call(0, Direction.FORWARD, Arithmetic.RING)


class RawStream:
    """Sends arbitrary bytes on one stream."""

    def __init__(self, provider: Provider, name: str = "raw", greet: bool = True) -> None:
        self.call = open_link(provider, name)
        if greet:
            self.send(frame.hello(FrameType.HELLO))
            assert self.receive().kind is FrameType.WELCOME

    def send(self, *messages: bytes) -> None:
        """Sends messages unchanged."""
        for message in messages:
            self.call.send(message)

    def request(self, request_id: int, tensor: torch.Tensor, call: Call = CALL, **changes: int) -> list[bytes]:
        """Returns the messages of a request, with `changes` made to its header."""
        size = tensor.numel() * 4
        fields = {"rows": tensor.shape[0], "cols": tensor.shape[1], "total_bytes": size, "deadline_ms": 30_000}
        header = Header(FrameType.REQUEST, request_id, call, **{**fields, **changes})
        return list(frame.frames(header, frame.tensor_bytes(tensor)))

    def receive(self) -> Header:
        """Returns the next frame's header."""
        return frame.parse(next(self.call))[0]

    def expect_error(self, request_id: int, code: WireCode) -> Header:
        """Checks that the next frame is this error and holds nothing else."""
        header = self.receive()
        assert (header.kind, header.request_id, WireCode(header.code)) == (FrameType.ERROR, request_id, code)
        assert (header.call, header.rows, header.cols, header.offset, header.total_bytes) == (_NO_CALL, 0, 0, 0, 0)
        assert code is WireCode.QUOTA or header.deadline_ms == 0
        return header

    def expect_end(self) -> None:
        """Checks that the provider ends the stream."""
        with pytest.raises(StopIteration):
            next(self.call)

    def half_close(self) -> None:
        """Stops sending."""
        self.call.half_close()

    def close(self) -> None:
        """Ends the stream."""
        self.call.close()
