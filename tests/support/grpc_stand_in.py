"""Runs a gRPC server that stands in for a provider. Its manifest is honest, and a test decides what its streams
send."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc

from provider.net.server import server_options
from provider.net.service import SERVICE_NAME
from tests.support.ring_products import REPLY_COLS
from tests.support.waiting import WAIT_S
from wire.frame import FrameType, Header


def reply_to(request: Header, **changes: Any) -> Header:
    """Returns the header of an honest reply to a request, with `changes` applied."""
    size = request.rows * REPLY_COLS * 4
    header = Header(FrameType.REPLY, request.request_id, request.call, request.rows, REPLY_COLS, 0, size)
    return replace(header, **changes)


class GrpcStandIn:
    """Accepts any number of streams. Subclasses define what is sent on them."""

    def __init__(self, manifest_bytes: bytes) -> None:
        self.manifest_bytes = manifest_bytes
        self._server = grpc.server(ThreadPoolExecutor(8), options=server_options())
        handlers = {
            "Manifest": grpc.unary_stream_rpc_method_handler(lambda request, context: iter([self.manifest_bytes])),
            "Stream": grpc.stream_stream_rpc_method_handler(self.stream),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))
        self.url = f"grpc://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stream(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Yields the messages that the server sends on one stream. `messages` yields those that it receives."""
        raise NotImplementedError

    def stop(self, wait_s: float = WAIT_S) -> None:
        """Ends the server and its streams, and waits for this at most `wait_s` seconds."""
        assert self._server.stop(0).wait(wait_s), "the stand-in's streams have not ended"
