"""Decides, for a thread, where the forward products of remote layers come from.

Usually the provider computes every product. Inside `products_from` another source answers: a store that keeps what the
provider answers, a store that hands the kept products out again, or `zeros`, with which a model runs without a call.

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
    """Inside the context, lets `source` answer this thread's forward products; None lets the provider answer."""
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


def zeros(ask: Callable[[], torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
    """Returns zeros in place of a product, and asks nobody: a source for running a model's own code alone."""
    return torch.zeros(shape)
