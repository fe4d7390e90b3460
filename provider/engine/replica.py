"""Defines the replica, which computes an executor's products: in this process, in a shard's process or on another host.

A product is a pure function of the request. If a product is lost, any replica with the same weights may compute it
again. This is safe for the tenant's masks: the rows are the same bytes as before, so no mask hides a second value.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from provider.engine.products import together
from wire.frame import Call
from wire.ring.seeded_rows import Rows

Product = Callable[[Call, Rows], torch.Tensor]
"""A function that computes one product; it raises only errors of `wire.errors` and `ReplicaLost`."""
Products = Callable[[Call, Sequence[torch.Tensor]], list[torch.Tensor]]
"""A function that computes the product of each of several matrices."""
RowProduct = Callable[[memoryview, memoryview], None]
"""A function that computes the product of one row: it reads the request's bytes and writes the reply's bytes, both with
numbers of the call's widths; see `wire.ring.kernels.OneRow`."""

RETRY_S = 1.0
"""The seconds after which tenants may retry while a lost replica is being restored, or while a device has no memory
left."""
_LEAST_S, _PRODUCTS_PER_S = 5.0, 5e8
"""The least time limit of a product, in seconds, and the rate, in multiplications per second, by which larger products
extend this limit. One core is ten times as fast as this rate. A tenant waits at least 30 s for a reply, so after the
least limit another replica still has enough time."""


def product_limit_s(num_products: int) -> float:
    """Returns the seconds after which a replica counts as hanging, for a product of `num_products` multiplications."""
    return _LEAST_S + num_products / _PRODUCTS_PER_S


class ReplicaLost(Exception):
    """Says that a replica was lost before it returned a product. The replica may or may not have computed the
    product."""

    def __init__(self, began: bool = True) -> None:
        """Keeps `began`: whether the replica may have received the rows. If so, the rows may have caused the crash."""
        super().__init__()
        self.began = began


class Replica(Protocol):
    """Computes products with the weights that it holds: one product at a time, unless `can_share` is true."""

    def product(self, call: Call, rows: Rows) -> torch.Tensor:
        """Computes one product; see `provider.engine.products.compute` for shapes.

        Raises:
            VeilbaseError: the request failed, and would fail on any other replica too.
            ReplicaLost: the replica is gone.
        """
        ...

    def products(self, call: Call, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Computes the products of several requests' rows at once; each reply owns its memory."""
        ...

    def row_product(self, call: Call) -> RowProduct | None:
        """Returns a function that computes the product of one row of a checked call in any thread; None if the replica
        has no such function for the call, so that `product` must be used."""
        ...

    @property
    def can_share(self) -> bool:
        """Returns whether another thread may compute a small product while a large one is being computed."""
        ...

    @property
    def is_alive(self) -> bool:
        """Returns whether the replica seems to be alive; the executor checks idle replicas regularly."""
        ...

    @property
    def can_return(self) -> bool:
        """Returns whether `revive` may succeed after the replica is lost."""
        ...

    def revive(self, is_over: threading.Event) -> bool:
        """Tries to bring a lost replica back; this may take long, but ends when `is_over` is set.

        Returns:
            True if the replica can compute products again; False if it never will, or if `is_over` was set first.
        """
        ...

    def close(self) -> None:
        """Closes the replica and frees its resources."""
        ...


class Here:
    """Computes products in this process. Such a replica is never lost."""

    is_alive, can_return = True, False

    def __init__(
        self,
        product: Product,
        products: Products | None = None,
        can_share: bool = True,
        row_product: Callable[[Call], RowProduct | None] = lambda call: None,
    ) -> None:
        """Keeps the functions that compute this replica's products.

        Args:
            product: computes one product in the calling thread.
            products: computes several products at once; None joins the rows and calls `product`.
            can_share: whether several threads may compute products at the same time.
            row_product: returns the function for one row of a call, or None; see `Replica.row_product`.
        """
        self.product, self.can_share, self.row_product = product, can_share, row_product
        self.products: Products = products or partial(together, product)

    def revive(self, is_over: threading.Event) -> bool:
        return False

    def close(self) -> None:
        """Does nothing, since there is nothing to close."""
