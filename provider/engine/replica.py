"""What makes an executor's products: this process, a shard's process, or a shard on another host.

Products are pure functions of the request, so one that was lost on its way may be made again by any holder of the same
weights: the rows are the same bytes, and no mask is used for anything else.
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
"""Makes one product; raises nothing but `wire.errors` and `ReplicaLost`."""
Products = Callable[[Call, Sequence[torch.Tensor]], list[torch.Tensor]]
"""Makes the product of each of several matrices."""
RowProduct = Callable[[memoryview, memoryview], None]
"""Makes the product of one row, from the bytes of a request into those of its reply; see `wire.ring.kernels.OneRow`."""


_LEAST_S, _PRODUCTS_PER_S = 5.0, 5e8
"""Seconds that a product may take in any case, and multiplications a second beyond that. A core makes ten times as
many; a tenant waits 30 s and more, so another replica still has time."""


def product_limit_s(num_products: int) -> float:
    """Returns the seconds after which a replica that makes so many multiplications counts as hanging."""
    return _LEAST_S + num_products / _PRODUCTS_PER_S


class ReplicaLost(Exception):
    """The replica that was to make a product is gone, and did not say whether it was made."""

    def __init__(self, began: bool = True) -> None:
        """Args: began: whether it may have got the rows, so that they may be what ended it."""
        super().__init__()
        self.began = began


class Replica(Protocol):
    """One holder of an executor's weights. It makes one product at a time, unless it says otherwise."""

    def product(self, call: Call, rows: Rows) -> torch.Tensor:
        """Makes one product, shape (num_rows, features of the other side); see `provider.engine.products.compute`.

        Raises:
            VeilbaseError: the request is at fault, or this replica in a way that another would not mend.
            ReplicaLost: the replica is gone.
        """
        ...

    def products(self, call: Call, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Makes `product` of several matrices at once; each reply has memory of its own."""
        ...

    def row_product(self, call: Call) -> RowProduct | None:
        """Returns what makes `product` of one row for a call that was checked, in any thread; None where only `product`
        can."""
        ...

    @property
    def can_share(self) -> bool:
        """Tells whether a small product may be made in another thread beside a large one."""
        ...

    @property
    def is_alive(self) -> bool:
        """Tells whether the replica seems to be there; asked now and then while it has nothing to do."""
        ...

    @property
    def can_return(self) -> bool:
        """Tells whether `revive` may bring the replica back once it is lost."""
        ...

    def revive(self, is_over: threading.Event) -> bool:
        """Brings a lost replica back; this may take long, but not longer than until `is_over`.

        Returns:
            Whether it can make products again; False means never.
        """
        ...

    def close(self) -> None:
        """Closes the replica."""
        ...


class Here:
    """A replica in this process, which is never lost."""

    is_alive, can_return = True, False

    def __init__(
        self,
        product: Product,
        products: Products | None = None,
        can_share: bool = True,
        row_product: Callable[[Call], RowProduct | None] = lambda call: None,
    ) -> None:
        """Keeps what it is given.

        Args:
            product: makes one product, in the calling thread.
            products: makes several at once; None uses `product`.
            can_share: whether several threads may make products at a time.
            row_product: makes the product of a row, where it can.
        """
        self.product, self.can_share, self.row_product = product, can_share, row_product
        self.products: Products = products or partial(together, product)

    def revive(self, is_over: threading.Event) -> bool:
        """Returns False; this replica is never lost."""
        return False

    def close(self) -> None:
        """Does nothing, since there is nothing to close."""
