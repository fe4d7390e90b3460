"""This module runs the provider in the tenant's own process, for `inproc:` URLs.

There is nothing to set up, and no privacy boundary. Only this module of tenant_sdk imports the provider's code, and
only for such a URL. The rules of import-linter list this exception.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import torch

from tenant_sdk.plan import INPROC
from wire.errors import ConfigurationError
from wire.transport.connection import Connection
from wire.transport.inproc import Handler, InprocConnection

SCHEME = INPROC
_SCRIPTED = f"{SCHEME}scripted:"
"""The beginning of the URL of a provider of tenant_sdk/testing.py."""
_numbers = itertools.count()
_open: dict[str, Callable[[str], Connection]] = {}
"""Connects to each provider of tenant_sdk/testing.py that is open, by its URL."""


def answer_by(connect: Callable[[str], Connection]) -> str:
    """Returns a URL of its own, at which clients of this process get the connections of a test's provider.

    Args:
        connect: returns a connection to the provider; its argument says whether weights are `int8` or `native`.
    """
    url = f"{_SCRIPTED}{next(_numbers)}"
    _open[url] = connect
    return url


def answer_no_more(url: str) -> None:
    """Ends what `answer_by` began. Connections that are open stay so."""
    del _open[url]


def served_model(model: str, weights: str) -> Handler:
    """Returns a provider of a model in this process, with `int8` or `native` weights. Raises ConfigurationError if the
    model is unknown."""
    from provider.embedded import serve_in_process

    return serve_in_process(model, "native" if weights == "native" else "int8")


def connect_inproc(url: str, weights: str | None = None) -> Connection:
    """Loads the model that a URL names, and returns a connection to a provider of this model.

    Args:
        url: inproc:smollm2-135m, inproc:/path/to/folder, inproc:/path/to/file.gguf or inproc:hub/id. With ?shards=N at
            its end, N processes hold the weights and compute, which end when the connection is closed; with
            ?device=cuda or ?device=cuda:N, that device computes.
        weights: `int8` (default) or `native`.

    Raises:
        ConfigurationError: the model is unknown, `weights` or the number of shards is impossible, or the device cannot
            be used.
    """
    from provider.embedded import ModelOnDevice, serve_in_process

    if weights not in (None, "int8", "native"):
        raise ConfigurationError(f"weights is int8 or native, got {weights!r}")
    if url.startswith(_SCRIPTED):
        if url not in _open:
            raise ConfigurationError(
                f"expected the URL of a ScriptedProvider that is open in this process, got {url[:60]!r}"
            )
        return _open[url](weights or "int8")
    model, has_shards, given = url.removeprefix(SCHEME).partition("?shards=")
    model, has_device, device = model.partition("?device=")
    if has_shards and not re.fullmatch(r"[1-9]\d{0,3}", given):
        raise ConfigurationError(f"expected inproc:MODEL?shards=N with N from 1, got {given[:40]!r} as N")
    if has_device and (has_shards or not re.fullmatch(r"cpu|cuda(:\d{1,2})?", device)):
        raise ConfigurationError(
            f"expected inproc:MODEL?device=cuda, or cuda:N, and no shards beside it, got {device[:40]!r}"
        )
    served_model = serve_in_process(
        model, "native" if weights == "native" else "int8", num_shards=int(given or 1), device=device or "cpu"
    )
    there = served_model.device if isinstance(served_model, ModelOnDevice) else None
    if has_shards or has_device:
        return _Owner(served_model, served_model.close, there)
    return InprocConnection(served_model)


class _Owner(InprocConnection):
    """Calls a provider that ends with the connection."""

    def __init__(self, handler: Handler, end: Callable[[], None], device: torch.device | None) -> None:
        super().__init__(handler, device)
        self._end = end

    def close(self) -> None:
        """Ends the provider: its processes, or what it holds on a device."""
        self._end()
