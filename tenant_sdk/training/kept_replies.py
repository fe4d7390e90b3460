"""This module recomputes a transformer block in the backward pass, from the provider's replies of the forward pass.

Activation checkpointing runs each block of a model twice. Here the first run stores every forward product that the
block got from the provider, and the second run takes the products from the store. Norms, activations and adapters are
computed again, but the provider is not asked again. What costs much to compute again and little to keep is stored too
(tenant_sdk/training/kept_results.py).

Guarantees: a run sends exactly the calls of a run without checkpointing. The second run gets bit-equal products, also
under a mask whose results differ slightly from call to call. A backward pass can run once for each forward pass.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tenant_sdk.model.product_source import products_from
from tenant_sdk.training.kept_results import Results, handing_out_results, keeping_results
from tenant_sdk.training.reply_store import KeptReply, ReplyStore
from wire.errors import StorageError


class KeptReplies:
    """Makes the two contexts in which torch's activation checkpointing runs a block (torch's `context_fn`)."""

    def __init__(self, store: ReplyStore) -> None:
        """Uses `store` for the replies of all blocks."""
        self._store = store

    def contexts(self) -> tuple[Any, Any]:
        """Returns two contexts: one for the first run, which stores replies, and one for the second, which uses
        them."""
        kept: deque[KeptReply] = deque()
        results: Results = deque()

        def keep(ask: Callable[[], torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
            with torch._C.DisableTorchFunction():  # masks and checks of replies multiply too
                product = ask()
            kept.append(self._store.keep(product))
            return product

        return _within(products_from(keep), keeping_results(self._store, results)), _handing_out(kept, results)


@contextlib.contextmanager
def _within(*contexts: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


@contextlib.contextmanager
def _handing_out(kept: deque[KeptReply], results: Results) -> Iterator[None]:
    def hand_out(ask: Callable[[], torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
        if not kept:
            raise StorageError("a block asked for more products in the backward pass than in the forward pass")
        product = kept.popleft().take()
        if product.shape != shape:
            raise StorageError("a block asked for other products in the backward pass than in the forward pass")
        return product

    try:
        with products_from(hand_out), handing_out_results(results):
            yield
    finally:  # torch ends the second run as soon as it has what it needs
        kept.clear()
        results.clear()
