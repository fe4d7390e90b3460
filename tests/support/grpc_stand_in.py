"""A gRPC server in a provider's place: an honest manifest, and a stream of which a test says what comes."""

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
    """Returns the header of an honest reply to a request, but for `changes`."""
    size = request.rows * REPLY_COLS * 4
    header = Header(FrameType.REPLY, request.request_id, request.call, request.rows, REPLY_COLS, 0, size)
    return replace(header, **changes)


class GrpcStandIn:
    """A server that takes any number of streams; what it sends on them is up to a subclass."""

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
        """Yields what the server sends on one stream; `messages` are what it receives there."""
        raise NotImplementedError

    def stop(self, wait_s: float = WAIT_S) -> None:
        """Ends the server and its streams, which may take `wait_s` seconds."""
        assert self._server.stop(0).wait(wait_s), "the stand-in's streams have not ended"
