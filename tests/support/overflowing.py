"""Clients of a provider whose products are not finite from some call on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attacks.programs.overflow import Fault, Overflower
from provider.model.served_model import ServedModel
from tenant_sdk import TenantClient, embedded
from tests.support.mask_parameters import TOY_OPTIONS
from wire.frame import Direction
from wire.transport.inproc import InprocConnection

HONEST = Fault(Direction.FORWARD, math.nan, 1 << 40)
"""A fault that no test lives to see."""
MASKS: dict[str, dict[str, Any]] = {
    "off": {"mask": "off", "arithmetic": "float"},
    "gaussian-pool": {"mask": "gaussian-pool"},
    "lattice": {"mask": "lattice", "mask_options": {**TOY_OPTIONS, "hints": "stream", "background": False}},
}
"""A client's options for each mask."""
Opened = Callable[..., tuple[TenantClient, Overflower]]
"""Makes a client, and gives it with its provider."""


@pytest.fixture
def opened(served_model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Makes clients of a provider with a fault, and returns each with its provider; `mask` names one of MASKS."""
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
