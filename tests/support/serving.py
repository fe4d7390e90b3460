"""Serves a model from a folder in this process or on a loopback port."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from provider.model.load import load, resolve
from provider.model.served_model import ServedModel
from provider.model.weights import serve_model
from provider.net.server import Server
from wire.limits import Limits


def make_served_model(folder: Path, weights: Any = "native", limits: Limits | None = None) -> ServedModel:
    """Returns the served model of a folder, as a provider makes it."""
    return ServedModel(serve_model(load(resolve(str(folder))), weights, limits=limits))


@contextmanager
def serving(served_model: Any, port: int = 0, state: Any = None) -> Iterator[Server]:
    """Serves a model on loopback inside the context, with TLS if a state folder is given."""
    server = Server("127.0.0.1", port, state)
    server.start(served_model)
    try:
        yield server
    finally:
        server.stop()
