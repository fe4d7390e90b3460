"""This module computes attention over long keys and values (KV) in chunks of tokens, each read in the type in which it
is kept.

Torch's own attention takes the whole KV of a layer in float32, and a mask of all rows and tokens. For a long request
these are a good part of the memory that all its KV takes in bf16 or fp8. Here one chunk at a time is float32, and only
chunks at the edge of what rows see have a mask. The softmax is computed online: a running maximum and sum, and a
running output that is scaled again whenever the maximum grows.

Guarantees: the result is that of `ragged.attend`, up to the rounding of floating-point sums. The memory that this takes
beside the KV does not grow with the number of tokens to which rows attend.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022.
"""

from __future__ import annotations

import torch

from tenant_sdk.serving.kv import RequestKv

LONG_TOKENS = 8192
"""From so many tokens on, attention is computed in chunks. Below, torch's own attention is as fast or faster
(`python -m benchmarks.long_context`)."""
_FP8_FACTOR = 16
"""For KV in fp8, attention is computed in chunks from a sixteenth of `LONG_TOKENS` on, since torch's own conversion of
fp8 numbers is slow (`_floats_of_fp8`)."""
CHUNK_TOKENS = 1024
"""The most tokens of a chunk. With so few, the keys and values that were read as float32 are still in the processor's
cache when they are multiplied, at least for a single row."""
_SIGN_OF_INT16 = -0x8000


def takes_chunks(query: torch.Tensor, kv: RequestKv, position: int, window: int | None) -> bool:
    """Returns whether `attend_in_chunks` computes the attention of a request's rows, rather than `ragged.attend`.

    A single row needs no mask, and torch reads float32 numbers where they are, so such a row gains nothing from chunks.
    If KV is on another device, it is sent in chunks, in the type in which it is kept.

    Args:
        query: on the device that computes the attention, shape (num_heads, num_rows, head_dim).
        kv, position, window: as in `attend_in_chunks`.
    """
    if query.device != kv.device:
        return True
    num_rows = query.shape[1]
    num_seen = position + num_rows - _first_seen(position, window)
    if kv.layout.dtype.itemsize == 1:
        return _FP8_FACTOR * num_seen >= LONG_TOKENS
    return num_seen >= LONG_TOKENS and not (num_rows == 1 and kv.layout.dtype == torch.float32)


def _first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(position - window + 1, 0)


def attend_in_chunks(
    query: torch.Tensor, kv: RequestKv, layer: int, position: int, window: int | None,
    scaling: float | None = None, softcap: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Computes the attention of one request's rows, whose keys and values are already in `kv`.

    Args:
        query: float32, shape (num_heads, num_rows, head_dim).
        kv: the request's keys and values.
        layer: the number of the layer.
        position: the position of the first row.
        window: the number of tokens that a row attends to; None means all.
        scaling, softcap: as in `ragged.attend`.

    Returns:
        The attention's output, shape (num_heads, num_rows, head_dim).
    """
    num_heads, num_rows, head_dim = query.shape
    first, stop = _first_seen(position, window), position + num_rows
    scale = head_dim**-0.5 if scaling is None else scaling
    # Heads that share keys are joined: (num_kv_heads, num_shared · num_rows, head_dim).
    sums = _OnlineSoftmax(query.reshape(kv.layout.num_kv_heads, -1, head_dim) * scale, softcap)
    for start in range(first, stop, CHUNK_TOKENS):
        end = min(start + CHUNK_TOKENS, stop)
        keys, values = read_floats(kv, layer, start, end, query.device)
        sums.add(keys, values, _mask(position, num_rows, start, end, window, query.device))
    return sums.result().reshape(num_heads, num_rows, -1)


def read_floats(
    kv: RequestKv, layer: int, start: int, stop: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the keys and values of some positions on a device, float32, each of shape (num_kv_heads, stop - start,
    head_dim).

    Raises:
        IndexError: a layer with a window does not keep all of these positions.
    """
    kept = kv.kept(layer, start, stop)
    if kept is None:
        raise IndexError("these positions are not kept")
    sent = [each.to(device) for each in kept]
    numbers = sent[0].float() if len(sent) == 1 else _floats_of_fp8(sent[0]).mul_(sent[1])
    return numbers[0], numbers[1]


def _floats_of_fp8(numbers: torch.Tensor) -> torch.Tensor:
    """Returns float8_e4m3fn numbers as float32.

    Both types have a sign, an exponent and a mantissa in this order, so the bits are moved to where float16 has them:
    the exponent is then too small by 15 - 7 = 8, that is by a factor of 256. That takes a fifth of the time of torch's
    own conversion. NaN becomes a number here. It becomes NaN again when it is multiplied by its scale,
    which is NaN as well.
    """
    bits = numbers.view(torch.int8).to(torch.int16)
    moved = bits.bitwise_left_shift(7).bitwise_and_(0x3FFF)
    signs = bits.bitwise_and_(_SIGN_OF_INT16)
    return moved.bitwise_or_(signs).view(torch.float16).to(torch.float32).mul_(256.0)


def _mask(
    position: int, num_rows: int, start: int, stop: int, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """Returns which of the chunk's tokens each row attends to, bool, shape (num_rows, stop - start); None if each row
    attends to all of them."""
    sees_all = stop - 1 <= position and (window is None or start > position + num_rows - 1 - window)
    if sees_all:
        return None
    rows = torch.arange(position, position + num_rows, device=device)[:, None]
    columns = torch.arange(start, stop, device=device)
    mask = columns <= rows
    return mask if window is None else mask & (columns > rows - window)


class _OnlineSoftmax:
    """Adds up softmax(query · keysᵀ) · values over chunks of tokens."""

    def __init__(self, query: torch.Tensor, softcap: float | None) -> None:
        """Makes a sum without chunks.

        Args:
            query: the scaled query, shape (num_kv_heads, num_packed, head_dim).
            softcap: see `ragged.attend`.
        """
        self._query, self._softcap = query, softcap
        self._lowest = torch.finfo(query.dtype).min  # Not -inf: a row may see nothing of its first chunk.
        self._largest = query.new_full((*query.shape[:2], 1), self._lowest)
        self._total = torch.zeros_like(self._largest)
        self._output = torch.zeros_like(query)

    def add(self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> None:
        products = torch.bmm(self._query, keys.transpose(1, 2))  # (num_kv_heads, num_packed, num_tokens)
        if self._softcap is not None:
            products = products.div_(self._softcap).tanh_().mul_(self._softcap)
        if mask is not None:
            by_row = products.view(len(products), -1, *mask.shape)  # (num_kv_heads, num_shared, num_rows, num_tokens)
            by_row.masked_fill_(~mask, -torch.inf)
        largest = torch.maximum(self._largest, products.amax(dim=-1, keepdim=True))
        weights = products.sub_(largest).exp_()
        shrunk = (self._largest - largest).exp_()
        self._largest, self._total = largest, self._total * shrunk + weights.sum(dim=-1, keepdim=True)
        self._output = self._output.mul_(shrunk).add_(torch.bmm(weights, values))

    def result(self) -> torch.Tensor:
        """Returns the weighted values, shape (num_kv_heads, num_packed, head_dim)."""
        return self._output / self._total
