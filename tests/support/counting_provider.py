"""Makes clients of a provider in this process that notes the rows of every call, and that lets a test modify
replies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attacks.programs.providers import HonestOffer
from provider.model.served_model import ServedModel
from tenant_sdk import TenantClient, embedded
from tests.support.mask_parameters import TOY_OPTIONS
from wire.frame import Call
from wire.ring.seeded_rows import Rows, count_rows
from wire.transport.inproc import InprocConnection

TOY_MASK = {**TOY_OPTIONS, "hints": "stream", "background": False}
"""The mask options of a client that uses the lattice mask with toy parameters."""
Change = Callable[[int, Call, torch.Tensor], torch.Tensor]
"""A function of a product's number, its call and its honest reply, which returns the reply that the tenant gets."""


class CountingProvider(HonestOffer):
    """Notes the rows of every call, and lets `change` modify the replies of products.

    Attributes:
        num_rows: the number of rows of each product.
        sent: the rows of each product whose rows came as a tensor; rows of a seed are left out.
        num_others: the number of calls that are no products, which are those for the mask's hints.
        change: modifies the replies of products.
    """

    def __init__(self, served_model: ServedModel) -> None:
        super().__init__(served_model)
        self.num_rows: list[int] = []
        self.sent: list[torch.Tensor] = []
        self.num_others = 0
        self.change: Change = lambda number, call, reply: reply

    def compute(self, call: Call, rows: Rows) -> torch.Tensor:
        """Notes the rows of a call, and returns its reply."""
        if call.purpose.name != "PRODUCT":
            self.num_others += 1
            return self.served_model.compute(call, rows)
        number = len(self.num_rows)
        self.num_rows.append(count_rows(rows))
        if isinstance(rows, torch.Tensor):
            self.sent.append(rows.clone())
        return self.change(number, call, self.served_model.compute(call, rows))

    def forget(self) -> None:
        """Starts the notes anew."""
        self.num_rows, self.sent, self.num_others = [], [], 0


def open_counted(
    served_model: ServedModel, cache: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[TenantClient, CountingProvider]:
    """Returns a client and its provider. By default it uses float arithmetic without a mask.

    Args:
        served_model: the provider's model.
        cache: the client's cache.
        monkeypatch: connects clients of this process to this provider until it is undone.
        options: options of the client.
    """
    provider = CountingProvider(served_model)
    monkeypatch.setattr(embedded, "connect_inproc", lambda *_: InprocConnection(provider))
    options = {"mask": "off", "arithmetic": "float", **options}
    return TenantClient("inproc:x", cache=cache, progress=False, **options), provider
