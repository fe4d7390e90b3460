"""Makes providers that a test lets fail or lie: with a false client bundle, with products that are not finite, or with
any messages on their streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import torch
from safetensors.torch import load, save

from attacks.programs.overflow import HONEST, Overflower
from attacks.programs.providers import HostileBundle
from provider.model.served_model import ServedModel
from provider.net.server import server_options
from provider.net.service import SERVICE_NAME
from tenant_sdk import TenantClient
from tests.support.lattice import TOY_OPTIONS
from tests.support.ring_products import REPLY_COLS
from tests.support.waiting import WAIT_S
from wire.frame import FrameType, Header


class Liar(HostileBundle):
    """Serves an honest provider's model with changed files or a changed manifest, and notes which files are fetched."""

    def __init__(self, served_model: ServedModel) -> None:
        super().__init__(served_model)
        self.fetched: list[str] = []

    def change_scales(self, name: str, alpha: torch.Tensor | None) -> None:
        """Replaces the scale of a layer, or removes it."""
        scales = load(self.files["scales.safetensors"])
        scales.pop(name)
        self.files["scales.safetensors"] = save(scales if alpha is None else {**scales, name: alpha})

    def read_file(self, file_name: str) -> Iterator[bytes]:
        """Yields a file with all changes made so far, and notes that it was fetched."""
        self.fetched.append(file_name)
        return super().read_file(file_name)


__all__ = ["HONEST", "MASKS", "Opened"]
MASKS: dict[str, dict[str, Any]] = {
    "off": {"mask": "off", "arithmetic": "float"},
    "gaussian-pool": {"mask": "gaussian-pool"},
    "lattice": {"mask": "lattice", "mask_options": {**TOY_OPTIONS, "hints": "stream", "background": False}},
}
"""A client's options for each mask."""
Opened = Callable[..., tuple[TenantClient, Overflower]]
"""A function that makes a client, and returns it with its provider."""


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
