"""This module keeps the results of two costly operations of a transformer block, so that the backward pass need not
compute them again: attention, and products that are much narrower than their input, such as those of LoRA's A.

It works beside tenant_sdk/training/kept_replies.py, which keeps the provider's products of the same block. These
results take about a seventh of the memory of those products. Attention over a long row takes most of the time of
computing a block again.

Guarantees: results come back bit for bit, in the layout in memory that they had. If the block runs an
operation in only one of its two runs, the other operations still get their own results. A result that was
not kept, because the store has no room for it or because the operation is another one (one on a GPU, or attention with
dropout), is computed again, which gives the same numbers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tenant_sdk.model.remote_linear import RemoteLinear
from tenant_sdk.training.reply_store import KeptReply, ReplyStore

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_PRODUCT = torch.ops.aten.mm.default
_COSTLY_CALLS = frozenset({
    functional.scaled_dot_product_attention, functional.linear, torch.matmul, torch.mm, torch.Tensor.matmul,
    torch.Tensor.mm, torch.Tensor.__matmul__,
})  # fmt: skip
"""The functions of torch's interface in Python that run these two operations."""
_NARROW = 8
"""A product is kept if it has at most 1/8 of the columns of its input."""
_SUM_BYTES = 4
"""The bytes of the float32 number that attention gives for each head and token, besides its output."""


Operation = tuple[Any, ...]
"""Identifies an operation of a block: the function, the weight's address (0 for attention), and the shape and type of
each tensor argument. A kept result holds the weight's memory, so that no other weight can get the same address:
autocast and some kinds of adapters make new weights in each run."""


@dataclass(frozen=True)
class _Kept:
    """Holds a kept tensor, the order of its dimensions in memory, and the memory of a product's weight."""

    reply: KeptReply
    order: tuple[int, ...]
    weight: torch.UntypedStorage | None

    def take(self) -> torch.Tensor:
        stored = self.reply.take()
        return stored.permute([self.order.index(each) for each in range(len(self.order))])


Results = deque[tuple[Operation, list[_Kept] | None]]
"""The operations of one block in their order, with their results. None stands for a result that was not kept."""


def _operation(func: Any, args: tuple[Any, ...]) -> Operation:
    tensors = [each for each in args if isinstance(each, torch.Tensor)]
    weight = args[1].data_ptr() if func is _PRODUCT else 0
    return func, weight, *((each.shape, each.dtype) for each in tensors)


def _is_costly(func: Any, args: tuple[Any, ...]) -> bool:
    return func is _ATTENTION or (func is _PRODUCT and args[0].is_cpu and _is_narrow(*args[1].shape))


def _is_narrow(in_features: int, out_features: int) -> bool:
    return out_features * _NARROW <= in_features


class _InCostlyCalls(TorchFunctionMode):
    """Turns a dispatch mode on inside those of torch's functions that may run a costly operation. Leaving the mode on
    for all operations would add four times as much time."""

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _COSTLY_CALLS:
            return func(*args, **(kwargs or {}))
        with self._mode:
            return func(*args, **(kwargs or {}))


class _Keeping(TorchDispatchMode):
    def __init__(self, store: ReplyStore, results: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._store, self._results = store, results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_costly(func, args):
            weight = args[1].untyped_storage() if func is _PRODUCT else None
            self._results.append((_operation(func, args), self._keep(result if weight is None else (result,), weight)))
        return result

    def _keep(self, tensors: tuple[torch.Tensor, ...], weight: torch.UntypedStorage | None) -> list[_Kept] | None:
        found = []
        for each in tensors:
            strides = each.stride()
            order = tuple(sorted(range(each.dim()), key=lambda place: -strides[place]))
            reply = self._store.keep_extra(each.permute(order))
            if reply is None:
                return None
            found.append(_Kept(reply, order, weight))
        return found


class _HandingOut(TorchDispatchMode):
    def __init__(self, results: Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kept = self._next(_operation(func, args)) if _is_costly(func, args) else None
        if kept is None:
            return func(*args, **(kwargs or {}))
        tensors = tuple(each.take() for each in kept)
        return tensors[0] if func is _PRODUCT else tensors

    def _next(self, operation: Operation) -> list[_Kept] | None:
        """Returns the operation's result, and forgets those before it, which the second run left out; None if there is
        no such operation, or its result was not kept."""
        while any(each == operation for each, _ in self._results):
            found, kept = self._results.popleft()
            if found == operation:
                return kept
        return None


def keeping_results(store: ReplyStore, results: Results) -> TorchFunctionMode:
    """Returns a context in which results of costly operations are kept in `store`, and appended to `results`."""
    return _InCostlyCalls(_Keeping(store, results))


def handing_out_results(results: Results) -> TorchFunctionMode:
    """Returns a context in which costly operations return the results at the beginning of `results`, and remove them
    there, in place of computing."""
    return _InCostlyCalls(_HandingOut(results))


def bytes_per_row(model: Any) -> int:
    """Returns the bytes that the results of all blocks take for each token, on a CPU; elsewhere nothing is kept.

    Args:
        model: a model of transformers, with or without adapters in it.
    """
    if model.device.type != "cpu":
        return 0
    config, item_bytes = model.config.get_text_config(), model.dtype.itemsize
    num_heads = int(getattr(config, "num_attention_heads", 0))
    head_dim = getattr(config, "head_dim", None) or int(getattr(config, "hidden_size", 0)) // max(num_heads, 1)
    attention: int = int(getattr(config, "num_hidden_layers", 1)) * num_heads * (head_dim * item_bytes + _SUM_BYTES)
    narrow = sum(
        int(each.out_features) * each.weight.dtype.itemsize
        for each in model.modules()
        if isinstance(each, nn.Linear)
        and not isinstance(each, RemoteLinear)
        and _is_narrow(each.in_features, each.out_features)
    )
    return attention + narrow
