"""This module keeps the keys and values (KV) of one request, in memory that grows with the request. It also decides
where KV is kept and where attention over it is computed.

fp32 keeps numbers exactly, and bf16 rounds them. fp8 keeps each key and value vector of a head and token as
float8_e4m3fn, with one float32 scale for each vector. The scale is the vector's largest magnitude divided by 448, so
that no number overflows.

If the tenant's model is on a device such as a GPU, KV of long requests may take more memory than the device has, and
host memory is larger. With `kv_device="cpu"` all KV is in host memory. Attention of a few rows, such as an answer's
row, is computed there: it reads each number only once, so on a host with enough cores, sending the numbers to the
device would take longer. Attention of many rows, such as a prompt's, is computed on the device, to which the KV of one
request and layer is sent. The tests passed on one H100; no time was measured there.

Guarantees: the bytes that a number of tokens takes are known before the memory is taken (`KvLayout.bytes_for`), and are
exceeded only while the memory grows, by those of one layer. A layer with a sliding window keeps no more tokens than the
window plus the rows of one step, and in a draft model the drafted tokens. If the same positions are written again, for
example after a failed step, the result is the same.

Source: "Symbiosis: Multi-Adapter Inference and Fine-Tuning" (2025), section 3.4, keeps KV on the host in this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tenant_sdk.serving import settings
from wire.errors import ConfigurationError

DEVICE_ROWS = 32
"""From so many rows of a request on, attention is computed on the device. The number comes from the arithmetic in
docs/long-context.md: with so many rows, a host with 32 cores takes as long to compute the products as the link to the
device takes to send the KV."""


def kv_place(asked: str | None, model_device: torch.device) -> torch.device:
    """Returns the device for KV.

    Args:
        asked: "cpu" for host memory; None for the model's own device.
        model_device: the device of the model.

    Raises:
        ConfigurationError: another device was asked for.
    """
    if asked is None:
        return model_device
    if asked != "cpu":
        raise ConfigurationError(f'kv_device is None, the model\'s device, or "cpu", got {ascii(asked)[:40]}')
    return torch.device("cpu")


def attention_device(num_rows: int, rows_device: torch.device, kv_device: torch.device) -> torch.device:
    """Returns the device that computes the attention of one request's rows in a step.

    Args:
        num_rows: the number of these rows.
        rows_device: the device of the model.
        kv_device: the device of the request's KV.
    """
    return rows_device if num_rows >= DEVICE_ROWS else kv_device


KV_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, full) for name, full in settings.KV_DTYPES.items()}
"""Maps the names of the types in which keys and values may be kept to torch's types."""
_LARGEST_FP8 = 448.0
"""The largest number of float8_e4m3fn, torch.finfo(torch.float8_e4m3fn).max."""
_SCALE_BYTES = 4


@dataclass(frozen=True)
class KvLayout:
    """Describes the keys and values that each layer of a model keeps.

    Attributes:
        windows: for each layer, the number of tokens that a token attends to, itself included; None means all.
        num_kv_heads, head_dim: the number of heads of keys and values and their size, the same in every layer.
        dtype: the type of the numbers that are kept.
        step_tokens: the most rows of one step.
        beside: the layout of the keys and values that a draft model keeps of the same tokens; None without a
            draft model.
        num_rewound: the most tokens by which a later update may begin before the last one. It is 0 if each
            update begins where the last one began, or later.
    """

    windows: tuple[int | None, ...]
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    step_tokens: int
    beside: KvLayout | None = None
    num_rewound: int = 0

    def capacity(self, layer: int, num_tokens: int) -> int:
        """Returns the largest number of tokens that a layer keeps for a request of `num_tokens` tokens."""
        window = self.windows[layer]
        return num_tokens if window is None else min(num_tokens, window - 1 + self.num_rewound + self.step_tokens)

    def bytes_for(self, num_tokens: int) -> int:
        """Returns the bytes of the keys and values of a request with `num_tokens` tokens, prompt and answer together.
        Those of a draft model (`beside`) are included."""
        capacity = sum(self.capacity(layer, num_tokens) for layer in range(len(self.windows)))
        scale = _SCALE_BYTES if self.dtype.itemsize == 1 else 0
        own = 2 * capacity * self.num_kv_heads * (self.head_dim * self.dtype.itemsize + scale)
        return own + (0 if self.beside is None else self.beside.bytes_for(num_tokens))


def kv_layout(model: Any, kv_dtype: str, step_tokens: int) -> KvLayout:
    """Returns the layout of the keys and values of a transformers model.

    Raises:
        ConfigurationError: `kv_dtype` is no known name, or the model keeps something else than keys and values.
    """
    if kv_dtype not in KV_DTYPES:
        raise ConfigurationError(f"kv_dtype is one of {', '.join(KV_DTYPES)}, got {ascii(kv_dtype)[:40]}")
    config = model.config.get_text_config(decoder=True)
    layers: Sequence[Any] = DynamicCache(config=config).layers
    if not layers or any(type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers):
        raise ConfigurationError(
            f"the engine does not serve {config.model_type}: its layers keep other than keys and values"
        )
    windows = tuple(layer.sliding_window if layer.is_sliding else None for layer in layers)
    num_heads = int(config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    return KvLayout(windows, int(num_kv_heads), int(head_dim), KV_DTYPES[kv_dtype], step_tokens)


def as_kept(numbers: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns keys or values in the dtype in which they are kept, and their scales if the dtype needs scales.

    Args:
        numbers: shape (num_kv_heads, num_tokens, head_dim).
        dtype: one of `KV_DTYPES`.

    Returns:
        The numbers in `dtype`, and None or float32 scales of shape (num_kv_heads, num_tokens, 1).
    """
    if dtype.itemsize > 1:
        return numbers.to(dtype), None
    largest = numbers.abs().amax(dim=-1, keepdim=True).float()
    scale = largest.clamp(min=torch.finfo(torch.float32).tiny) / _LARGEST_FP8
    return (numbers.float() / scale).clamp(-_LARGEST_FP8, _LARGEST_FP8).to(dtype), scale


class _LayerKv:
    """Keeps the keys and values of one layer, for at most `capacity` positions from `_first` on."""

    def __init__(self, layout: KvLayout, window: int | None, capacity: int, device: torch.device) -> None:
        self._window = window
        self._first, self._num_rewound = 0, layout.num_rewound
        self._allocate(layout, capacity, device)

    def _allocate(self, layout: KvLayout, capacity: int, device: torch.device) -> None:
        shape = (2, layout.num_kv_heads, capacity, layout.head_dim)
        self.capacity = capacity
        # The operating system gives no memory to pages that are never written.
        self._kept = torch.empty(shape, dtype=layout.dtype, device=device)
        self._halves = self._kept.unbind(0)  # The keys, and the values.
        self._scales = torch.empty(*shape[:3], 1, device=device) if layout.dtype.itemsize == 1 else None

        kept, scales = self._halves, (None, None) if self._scales is None else self._scales.unbind(0)
        self.addresses = [0 if each is None else each.data_ptr() for each in (*kept, *scales)]

    def grow(self, layout: KvLayout, capacity: int) -> None:
        """Moves what is kept to memory for `capacity` positions; does nothing if there is as much already."""
        if capacity <= self.capacity:
            return
        before, num_before = (self._kept, self._scales), self.capacity
        self._allocate(layout, capacity, self._kept.device)
        for old, new in zip(before, (self._kept, self._scales), strict=True):
            if old is not None and new is not None:
                new[:, :, :num_before] = old

    def make_room(self, position: int, num_new: int) -> int:
        """Makes room for new tokens, and returns the index in memory of the first of them."""
        if position + num_new - self._first > self.capacity:
            self._drop(position)
        return position - self._first

    def write(self, position: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        index_new = self.make_room(position, keys.shape[1])
        for index, numbers in enumerate((keys, values)):
            self._write(index, index_new, numbers)

    def update(self, position: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.write(position, keys, values)
        stop = position + keys.shape[1]
        begin = 0 if self._window is None else max(position - self._window + 1, 0)
        at, num_seen = begin - self._first, stop - begin
        return self._read(0, at, num_seen, keys.dtype), self._read(1, at, num_seen, values.dtype)

    def _drop(self, position: int) -> None:
        """Makes room: drops the keys and values to which no later row can attend, and moves the rest to the front."""
        begin = max(position - (self._window or 1) + 1 - self._num_rewound, self._first)
        for tensor in (self._kept, self._scales):
            if tensor is not None:
                tensor[:, :, : position - begin] = tensor[:, :, begin - self._first : position - self._first].clone()
        self._first = begin

    def _write(self, index: int, at: int, numbers: torch.Tensor) -> None:
        num_new = numbers.shape[1]
        numbers, scale = as_kept(numbers, self._kept.dtype)
        if self._scales is not None and scale is not None:
            self._scales[index].narrow(1, at, num_new).copy_(scale)
        self._halves[index].narrow(1, at, num_new).copy_(numbers)

    def _read(self, index: int, at: int, num_seen: int, dtype: torch.dtype) -> torch.Tensor:
        kept = self._halves[index].narrow(1, at, num_seen).to(dtype)
        return kept if self._scales is None else kept * self._scales[index].narrow(1, at, num_seen).to(dtype)

    def kept(self, start: int, stop: int) -> tuple[torch.Tensor, ...] | None:
        if start < self._first or stop - self._first > self.capacity:
            return None
        at = slice(start - self._first, stop - self._first)
        return tuple(each[:, :, at] for each in (self._kept, self._scales) if each is not None)

    def begin_after(self, num_tokens: int) -> None:
        self._first = 0 if self._window is None else max(num_tokens - self._window + 1, 0)

    def clear(self) -> None:
        self._kept.zero_()
        if self._scales is not None:
            self._scales.zero_()


class RequestKv:
    """Keeps the keys and values of one request in all layers."""

    def __init__(self, layout: KvLayout, num_tokens: int, device: torch.device) -> None:
        """Allocates memory for keys and values.

        Args:
            layout: the layout of the model's keys and values.
            num_tokens: the number of tokens of the request, of prompt and answer together, for which there is room.
            device: the device of the memory.
        """
        self._layout = layout
        self.device = device
        self.num_tokens = num_tokens
        self._layers = [
            _LayerKv(layout, window, layout.capacity(layer, num_tokens), device)
            for layer, window in enumerate(layout.windows)
        ]
        self._note_addresses()

    def _note_addresses(self) -> None:
        addresses = [[*each.addresses, each.capacity] for each in self._layers]
        self._addresses = np.array(addresses, dtype=np.int64)

    def grow(self, num_tokens: int) -> None:
        """Makes room for `num_tokens` tokens in all, and keeps what is kept; does nothing if there is room already.
        Addresses that `describe` returned before are no longer valid."""
        if num_tokens <= self.num_tokens:
            return
        self.num_tokens = num_tokens
        for number, layer in enumerate(self._layers):  # One after the other, so that only one layer is held twice.
            layer.grow(self._layout, self._layout.capacity(number, num_tokens))
        self._note_addresses()

    @property
    def layout(self) -> KvLayout:
        """Returns the layout of the model's keys and values."""
        return self._layout

    def describe(self, position: int, num_new: int) -> npt.NDArray[np.int64]:
        """Makes room for new tokens in every layer, and returns where each layer's keys and values are in memory.

        Args:
            position: the position of the first new token; all positions before it must have been written.
            num_new: the number of new tokens.

        Returns:
            int64, shape (num_layers, 6): the addresses of keys, values, keys' scales and values' scales (0 without
            scales), the capacity in tokens, and the index of the first new token.
        """
        index = [each.make_room(position, num_new) for each in self._layers]
        return np.column_stack((self._addresses, index))

    def update(
        self, layer: int, position: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps the keys and values of new tokens, and returns all keys and values that these tokens may attend to.

        Args:
            layer: the number of the layer.
            position: the position of the first new token; all positions before it must have been written.
            keys, values: shape (num_kv_heads, num_new, head_dim).

        Returns:
            Keys and values, each of shape (num_kv_heads, num_seen, head_dim) and of the dtype of the given tensors. The
            last `num_new` tokens are the new ones. In a layer with a window, the first token is the earliest that the
            first new token attends to.

        Raises:
            ConfigurationError: the model's layers have other shapes than the model's config states.
        """
        self._check_heads(layer, keys, values)
        return self._layers[layer].update(position, keys, values)

    def write(self, layer: int, position: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keeps the keys and values of new tokens. Args, Raises: see `update`."""
        self._check_heads(layer, keys, values)
        self._layers[layer].write(position, keys, values)

    def _check_heads(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if layer >= len(self._layers) or keys.shape[0] != self._layout.num_kv_heads or any(
            each.shape[-1] != self._layout.head_dim for each in (keys, values)
        ):  # fmt: skip
            raise ConfigurationError(
                "the engine does not serve this model: its layers have other heads than its config says"
            )

    def kept(self, layer: int, start: int, stop: int) -> tuple[torch.Tensor, ...] | None:
        """Returns what is kept of the tokens at some positions, as views that can also be written to.

        Args:
            layer: the number of the layer.
            start, stop: a range of positions, `stop` excluded, up to the number of tokens for which there is room.

        Returns:
            The numbers of keys and values, shape (2, num_kv_heads, stop - start, head_dim), and for fp8 also their
            scales, shape (2, num_kv_heads, stop - start, 1). None if a layer with a window has no place for one of the
            positions, or no longer has one.
        """
        return self._layers[layer].kept(start, stop)

    def begin_after(self, num_tokens: int) -> None:
        """Makes empty memory ready for keys and values that are copied into it, as if `num_tokens` tokens had been
        computed. In a layer with a window, only the places of the tokens that a later token attends to remain."""
        for layer in self._layers:
            layer.begin_after(num_tokens)

    def clear(self) -> None:
        """Overwrites all keys and values with zeros."""
        for layer in self._layers:
            layer.clear()
