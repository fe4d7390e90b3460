"""Makes clients of a provider whose products are not finite from some call on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attacks.programs.overflow import HONEST, Fault, Overflower
from provider.model.served_model import ServedModel
from tenant_sdk import TenantClient, embedded
from tests.support.mask_parameters import TOY_OPTIONS
from wire.transport.inproc import InprocConnection

__all__ = ["HONEST", "MASKS", "Opened", "opened"]
MASKS: dict[str, dict[str, Any]] = {
    "off": {"mask": "off", "arithmetic": "float"},
    "gaussian-pool": {"mask": "gaussian-pool"},
    "lattice": {"mask": "lattice", "mask_options": {**TOY_OPTIONS, "hints": "stream", "background": False}},
}
"""A client's options for each mask."""
Opened = Callable[..., tuple[TenantClient, Overflower]]
"""A function that makes a client, and returns it with its provider."""


@pytest.fixture
def opened(served_model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Provides a function that makes clients of a provider with a fault. It returns each client with its provider; its
    argument `mask` is a key of MASKS."""
    clients: list[TenantClient] = []

    def make(
        fault: Fault = HONEST, mask: str = "off", served_model: ServedModel = served_model, **options: Any
    ) -> tuple[TenantClient, Overflower]:
        provider = Overflower(served_model, fault)
        monkeypatch.setattr(embedded, "connect_inproc", lambda *_: InprocConnection(provider))
        options = {"cache": tmp_path / "cache", "progress": False, **MASKS[mask], **options}
        clients.append(TenantClient("inproc:x", **options))
        return clients[-1], provider

    yield make
    for client in clients:
        client.close()
