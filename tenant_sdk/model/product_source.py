"""This module decides, for each thread, where the forward products of remote layers come from.

Usually the provider computes every product. Inside the context `products_from`, the products come from another source.
A source can ask the provider and also store the product, return a stored product, or return zeros. With the source
`zeros` a model runs without any call.

Guarantees: the source belongs to one thread and ends with its context. Backward products always come from the provider.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

ProductSource = Callable[[Callable[[], torch.Tensor], tuple[int, int]], torch.Tensor]
"""A function that takes (a function that asks the provider, the product's shape) and returns the product."""

_local = threading.local()


@contextlib.contextmanager
def products_from(source: ProductSource | None) -> Iterator[None]:
    """Makes this thread take forward products from `source` inside the context, or from the provider if it is None."""
    before = getattr(_local, "source", None)
    _local.source = source
    try:
        yield
    finally:
        _local.source = before


def product(ask: Callable[[], torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
    """Returns a forward product from this thread's source.

    Args:
        ask: a function that asks the provider for the product.
        shape: the product's shape, (num_rows, out_features of the group).
    """
    source: ProductSource | None = getattr(_local, "source", None)
    return ask() if source is None else source(ask, shape)


def sends_nothing() -> bool:
    """Returns whether this thread's forward products are zeros, so that it must not ask the provider for others."""
    return getattr(_local, "source", None) is zeros


def zeros(ask: Callable[[], torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
    """Returns zeros in place of a product, without asking the provider. With this source only a model's own code
    runs."""
    return torch.zeros(shape)
