"""This module calls the compiled attention of kernels.c, for x86-64 processors with AVX2 and FMA.

Guarantees: the results equal those of torch's attention up to rounding. If kernels.c was not built, or the processor
lacks what the compiled code needs, `available()` and `serves()` return False, and `attend` raises an error.

This module checks all arguments of the compiled code, which checks nothing itself.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from runtime.compiled import COUNT, POINTER, Signature, load
from runtime.threads import share
from wire.errors import ConfigurationError

LIBRARY = Path(__file__).with_name("_kernels.so")
MOST_ROWS = 16
"""The most rows of one request in a step for which the compiled code is used. Torch is faster for longer pieces of
prompts."""
LANES = 8
"""The size of a head must be a multiple of this number."""
_MOST_HEAD_DIM = 512
_LEAST_SHARED = 1 << 20
"""The least number of values in a step's keys for which several threads compute the attention of a layer. One thread
needs about half a millisecond for this number."""
_VERSION = 2
"""The version of the functions' signatures, as in kernels.c; see `wire.ring.kernels`."""
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2}

PIECE_FIELDS = 8
"""How many numbers describe a piece to the compiled code: the addresses of keys, values, keys' scales and values'
scales, then the capacity in tokens, the index in this memory at which the piece's new tokens begin, the index of its
first row in the step, and its number of rows."""


class _Fresh(ctypes.Structure):
    """Mirrors the C type `fresh`, which describes the new keys, or the new values, of all rows of a step."""

    _fields_ = (
        ("numbers", POINTER), ("head_stride", COUNT), ("row_stride", COUNT),
        ("scales", POINTER), ("scale_head_stride", COUNT), ("scale_row_stride", COUNT),
    )  # fmt: skip


class _Setting(ctypes.Structure):
    """Mirrors the C type `setting`, which holds what all pieces of a call share."""

    _fields_ = (
        ("query", POINTER), ("row_stride", COUNT), ("head_stride", COUNT), ("out", POINTER),
        ("num_heads", COUNT), ("num_kv_heads", COUNT), ("head_dim", COUNT), ("window", COUNT), ("dtype", COUNT),
        ("scaling", ctypes.c_float), ("softcap", ctypes.c_float), ("decoded", POINTER),
    )  # fmt: skip


_FUNCTIONS: dict[str, Signature] = {
    # heads that share keys, most rows, head_dim
    "veilbase_attention_scratch": ([COUNT] * 3, COUNT),
    # pieces, kv heads of all pieces from and to, new keys, new values, setting, scratch
    "veilbase_attend": ([POINTER, COUNT, COUNT, *[POINTER] * 4], None),
}
"""The compiled functions, with the types of their arguments and results."""


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load(LIBRARY, ("veilbase_attention_version", _VERSION), "veilbase_attention_usable", _FUNCTIONS)


def available() -> bool:
    """Returns whether this machine can use the compiled attention; False if the environment variable VEILBASE_KERNELS
    is `none`."""
    return _library() is not None


def serves(head_dim: int, dtype: torch.dtype) -> bool:
    """Returns whether the compiled attention can be used on this machine for keys and values of this head size and
    dtype."""
    return head_dim % LANES == 0 and 0 < head_dim <= _MOST_HEAD_DIM and dtype in _KINDS and available()


@functools.cache
def _decoded() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


@dataclass(frozen=True)
class NewVectors:
    """Holds the new keys, or the new values, of all rows of a step, in the dtype in which they are kept.

    Attributes:
        numbers: shape (num_kv_heads, num_rows, head_dim).
        scales: float32, shape (num_kv_heads, num_rows, 1); None if the dtype needs no scales.
    """

    numbers: torch.Tensor = field(repr=False)
    scales: torch.Tensor | None = field(default=None, repr=False)


def attend(
    pieces: npt.NDArray[np.int64],
    query: torch.Tensor,
    keys: NewVectors,
    values: NewVectors,
    out: torch.Tensor,
    *,
    window: int | None,
    scaling: float,
    softcap: float | None,
) -> None:
    """Keeps the new keys and values of each piece, and computes the attention of each piece's rows.

    Args:
        pieces: int64, shape (num_pieces, PIECE_FIELDS), see `PIECE_FIELDS`. The addresses must be those of tensors of
            the shapes (num_kv_heads, capacity, head_dim) and (num_kv_heads, capacity) that the caller keeps alive.
        query: float32, shape (num_heads, num_rows, head_dim), CPU.
        keys, values: the new keys and values of all rows.
        out: float32, shape (num_rows, num_heads, head_dim), contiguous; the rows of the pieces are written.
        window: the number of tokens that a row attends to, itself included; None means all.
        scaling: the factor for the products of queries and keys.
        softcap: the bound c of the scaled products p, which become c · tanh(p / c); None means no bound.

    Raises:
        ConfigurationError: shapes do not fit together, a piece does not fit into its memory, or the compiled attention
            cannot be used for these heads on this machine.
    """
    library = _library()
    num_heads, _, head_dim = query.shape
    num_kv_heads = keys.numbers.shape[0]
    _check(pieces, query, keys, values, out)
    if library is None or num_heads % num_kv_heads or not serves(head_dim, keys.numbers.dtype):
        raise ConfigurationError("no compiled attention for these heads on this machine")
    query = query if query.stride(2) == 1 else query.contiguous()
    fresh = [_fresh(each) for each in (keys, values)]
    most_rows = int(pieces[:, 7].max())
    scratch_size = library.veilbase_attention_scratch(num_heads // num_kv_heads, most_rows, head_dim)
    setting = _Setting(
        query.data_ptr(), query.stride(1), query.stride(0), out.data_ptr(), num_heads, num_kv_heads, head_dim,
        window or 0, _KINDS[keys.numbers.dtype], scaling, softcap or 0.0, _decoded().data_ptr(),
    )  # fmt: skip
    num_items = len(pieces) * num_kv_heads
    addresses = (*(ctypes.addressof(each) for each, _ in fresh), ctypes.addressof(setting))
    held = pieces, query, fresh, setting, out  # A helper thread may go on after an interrupt; see `share`.

    def work(items: Iterator[tuple[int, int]], _held: object = held) -> None:
        scratch = torch.empty(scratch_size)
        for first, last in items:
            library.veilbase_attend(pieces.ctypes.data, first, last, *addresses, scratch.data_ptr())

    if int(pieces[:, 5].sum()) * num_kv_heads * head_dim < _LEAST_SHARED:
        work(iter([(0, num_items)]))
    else:
        share(work, [(item, item + 1) for item in range(num_items)])


def _check(
    pieces: npt.NDArray[np.int64], query: torch.Tensor, keys: NewVectors, values: NewVectors, out: torch.Tensor
) -> None:
    num_heads, num_rows, head_dim = query.shape
    shape = (keys.numbers.shape[0], num_rows, head_dim)
    fits = (
        keys.numbers.shape == values.numbers.shape == shape
        and keys.numbers.dtype == values.numbers.dtype
        and all((each.scales is None) == (each.numbers.dtype.itemsize > 1) for each in (keys, values))
        and query.dtype == out.dtype == torch.float32
        and out.shape == (num_rows, num_heads, head_dim)
        and out.is_contiguous()
        and all(each.device.type == "cpu" for each in (query, keys.numbers, values.numbers, out))
        and pieces.dtype == np.int64
        and pieces.ndim == 2
        and pieces.shape[1] == PIECE_FIELDS
        and pieces.flags.c_contiguous
    )
    if not fits:
        raise ConfigurationError("the tensors of a step's attention do not fit together")
    capacity, at, first_row, rows = pieces[:, 4:].T
    if (at < 0).any() or (rows < 1).any() or (at + rows > capacity).any() or (first_row < 0).any() or (
        first_row + rows > num_rows
    ).any():  # fmt: skip
        raise ConfigurationError("a piece of a step does not fit into its keys and values")


def _fresh(given: NewVectors) -> tuple[_Fresh, tuple[torch.Tensor | None, ...]]:
    """Returns the C struct of new vectors, and the tensors that must live as long as the struct."""
    numbers, scales = given.numbers, given.scales
    numbers = numbers if numbers.stride(2) == 1 else numbers.contiguous()
    size = numbers.element_size()
    where = (None, 0, 0) if scales is None else (scales.data_ptr(), scales.stride(0), scales.stride(1))
    return _Fresh(numbers.data_ptr(), numbers.stride(0) * size, numbers.stride(1) * size, *where), (numbers, scales)
