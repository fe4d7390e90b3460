"""This module keeps the keys and values of a batch that goes through the model in windows, and their gradients.

A window is a range of tokens; see tenant_sdk/training/windows.py.

A later window attends to the keys and values of earlier windows, so its backward pass gives a part of their gradients.
These parts are added up here. The backward pass of the window that computed the keys and values starts from the sum.

Guarantees: the keys of a layer are one tensor for all tokens, and so are its values. A window gets a view of a part of
it, not a copy. The memory of a layer's gradients is allocated when the first gradient arrives. By then autograd has
freed what it kept for this layer.

Source: FlexLLM (arXiv:2402.18789), Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from wire.errors import ConfigurationError


class _Kept:
    """Keeps the keys, or the values, of one layer for all tokens of a batch, and the sum of their gradients."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._numbers: torch.Tensor | None = None
        self._gradients: torch.Tensor | None = None
        self.own: torch.Tensor | None = None
        """The part that the present window computed, with its autograd graph; None before that, or if it needs no
        gradient."""
        self._prefix: torch.Tensor | None = None
        self._anchor: torch.Tensor | None = None

    def put_prefix(self, prefix: torch.Tensor, stop: int) -> None:
        """Stores the keys (or values) of virtual tokens that are trained, which end before the token `stop`."""
        self.extended(prefix, 0, stop - prefix.shape[2], is_again=False)
        self._prefix, self.own = self.own, None
        self._anchor = prefix.new_zeros(0).requires_grad_()  # lets autograd record windows that have nothing to train

    def prefix_gradient(self, stop: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns what `put_prefix` stored, with its gradient from all windows; None if there is no such gradient."""
        if self._prefix is None or self._gradients is None:
            return None
        return self._prefix, self._gradients[:, :, stop - self._prefix.shape[2] : stop].to(self._prefix.dtype)

    def extended(self, own: torch.Tensor, first: int, start: int, is_again: bool) -> torch.Tensor:
        """Stores the keys (or values) of the present window, and returns those of the tokens from `first` on.

        Args:
            own: the keys or values of the window's tokens, shape (batch, num_kv_heads, window tokens, head_dim).
            first: the index of the first token to which the window's first token may attend.
            start: the index of the window's first token.
            is_again: whether the same window is computed again for checkpointing, so that nothing may be written:
                autograd has kept the first result.
        """
        if self._numbers is None:
            self._numbers = own.new_empty(*own.shape[:2], self._num_tokens, own.shape[3])
        stop = start + own.shape[2]
        if not is_again:
            with torch.no_grad():
                self._numbers[:, :, start:stop] = own
        if not (torch.is_grad_enabled() and (own.requires_grad or self._anchor is not None)):
            return self._numbers[:, :, first:stop]
        if not is_again and own.requires_grad:
            self.own = own
        given = (own, self._anchor, self, self._numbers, first, start)
        seen: torch.Tensor = _Seen.apply(*given)  # type: ignore[no-untyped-call]
        return seen

    def add_gradient(self, gradient: torch.Tensor, first: int, start: int) -> None:
        """Adds a gradient, shape (batch, num_kv_heads, tokens, head_dim), to the sum for tokens `first` to `start`."""
        if first == start:
            return
        if self._gradients is None:
            # float32, since the sum has a part from every later window
            shape = (*gradient.shape[:2], start, gradient.shape[3])
            self._gradients = torch.zeros(shape, dtype=torch.float32, device=gradient.device)
        self._gradients[:, :, first:start] += gradient

    def taken(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the keys (or values) of the present window and their gradient from later windows, and drops `own`.
        Returns None if there is no such gradient."""
        own, self.own = self.own, None
        if own is None or self._gradients is None:
            return None
        return own, self._gradients[:, :, start:stop].to(own.dtype)


class _Seen(torch.autograd.Function):
    """Returns the keys or values to which a window may attend, as a view, and passes their gradients on."""

    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, anchor: torch.Tensor | None, kept: _Kept, numbers: torch.Tensor, first: int,
        start: int,
    ) -> torch.Tensor:  # fmt: skip
        """Returns the part of `numbers`, all keys or values, from token `first` to the end of the window.

        `own`, the part of the window that begins at token `start`, is already in `numbers`. It is an argument so that
        it gets a gradient. `anchor` is an argument so that autograd calls `backward` even if `own` needs no gradient.
        """
        ctx.kept, ctx.first, ctx.start = kept, first, start
        return numbers[:, :, first : start + own.shape[2]]

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        """Returns the gradient of the window's own keys or values, and adds that of earlier ones to `kept`'s sum."""
        num_earlier = ctx.start - ctx.first
        ctx.kept.add_gradient(gradient[:, :, :num_earlier], ctx.first, ctx.start)
        return gradient[:, :, num_earlier:], None, None, None, None, None


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """Holds one layer of a `WindowCache`, with the interface that transformers' model code expects."""

    is_croppable = False

    def __init__(self, sliding_window: int | None, num_tokens: int) -> None:
        super().__init__()
        self.is_sliding = sliding_window is not None
        self._sliding_window = sliding_window
        self._kept = (_Kept(num_tokens), _Kept(num_tokens))
        self._start = 0
        self.num_updates = 0

    def begin(self, start: int) -> None:
        self._start, self.num_updates = start, 0

    @property
    def _first(self) -> int:
        return 0 if self._sliding_window is None else max(self._start - self._sliding_window + 1, 0)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        is_again = self.num_updates > 0
        self.num_updates += 1
        self.is_initialized = True
        return tuple(
            kept.extended(own, self._first, self._start, is_again)
            for kept, own in zip(self._kept, (key_states, value_states), strict=True)
        )

    def taken(self, stop: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for kept in self._kept:
            found = kept.taken(self._start, stop)
            if found is not None:
                yield found

    def put_prefix(self, keys: torch.Tensor, values: torch.Tensor, stop: int) -> None:
        for kept, given in zip(self._kept, (keys, values), strict=True):
            kept.put_prefix(given, stop)

    def prefix_gradients(self, stop: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for kept in self._kept:
            found = kept.prefix_gradient(stop)
            if found is not None:
                yield found

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._start + query_length - self._first, self._first

    def get_seq_length(self) -> int:
        return self._start

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing: memory is taken by the first `update`."""


class WindowCache(Cache):  # type: ignore[misc]
    """Holds the keys and values of a batch that goes through a model window by window, as a cache of transformers."""

    def __init__(self, sliding_windows: Sequence[int | None], num_tokens: int, prefix: Cache | None = None) -> None:
        """Makes a cache without the batch's tokens.

        Args:
            sliding_windows: for each layer, the number of tokens that a token attends to; None means all.
            num_tokens: the number of tokens of each row of the batch.
            prefix: keys and values of virtual tokens in front of each row, as a cache of transformers; None for no
                such tokens. Indices of tokens, below, do not count virtual tokens.
        """
        self.num_virtual = 0 if prefix is None else prefix.get_seq_length()
        super().__init__(layers=[_Layer(window, self.num_virtual + num_tokens) for window in sliding_windows])
        for layer, given in zip(self.layers, [] if prefix is None else prefix.layers, strict=prefix is not None):
            layer.put_prefix(given.keys, given.values, self.num_virtual)

    def begin(self, start: int) -> None:
        """Begins a pass over the window whose first token has the index `start`. Earlier windows must come first."""
        for layer in self.layers:
            layer.begin(self.num_virtual + start)

    def check(self) -> None:
        """Checks, after a pass, that every layer of the model has used this cache.

        Raises:
            ConfigurationError: a layer did not use the cache, so it did not attend to earlier windows.
        """
        if not all(layer.num_updates for layer in self.layers):
            raise ConfigurationError("window_tokens is not possible: not every layer of this model uses its cache")

    def taken(self, stop: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the keys, and the values, that the last pass computed in each layer, with their gradient from later
        windows.

        Args:
            stop: the end of the window.
        """
        for layer in self.layers:
            yield from layer.taken(self.num_virtual + stop)

    def prefix_gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields the keys, and the values, of the virtual tokens in each layer, with their gradient from all
        windows."""
        for layer in self.layers:
            yield from layer.prefix_gradients(self.num_virtual)
