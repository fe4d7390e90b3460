"""This module computes the attention of all requests that have few rows in a step, layer by layer in one call each.

A `Piece` describes which rows of a step belong to a request. An answer that is being written has one row in each step.
Torch would compute the attention of each request in calls of its own, and copy keys and values that are not kept in
float32. The compiled attention (kernels.c) reads all requests' keys and values where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from tenant_sdk.serving.attention import kernels
from tenant_sdk.serving.kv import KvLayout, RequestKv, as_kept
from wire.errors import ConfigurationError


@dataclass(frozen=True)
class Piece:
    """Describes the rows of one request in a step.

    Attributes:
        kv: the request's keys and values.
        position: the position of the first row that is not padding; padding before a prompt has no position.
        num_rows: the number of rows, with padding.
        num_unseen: the number of padding rows at the beginning. No row attends to them, and their attention gives
            zeros.
    """

    kv: RequestKv = field(repr=False)
    position: int
    num_rows: int
    num_unseen: int = 0


class FewRows:
    """Holds the pieces of few rows of one step."""

    def __init__(self, pieces: Sequence[tuple[int, Piece]]) -> None:
        """Makes room for the new tokens of all pieces in all layers.

        Args:
            pieces: for each piece, the step's row that is the piece's first row after padding, and the piece; at least
                one. Rows of padding are not computed.
        """
        self._layout: KvLayout = pieces[0][1].kv.layout
        self._pieces = pieces  # Their keys and values must live as long as this object, which holds their addresses.
        counts = [piece.num_rows - piece.num_unseen for _, piece in pieces]
        places = [piece.kv.describe(piece.position, count) for (_, piece), count in zip(pieces, counts, strict=True)]
        rows = np.array([(first, count) for (first, _), count in zip(pieces, counts, strict=True)], dtype=np.int64)
        shape = (len(places[0]), *rows.shape)
        joined = np.concatenate((np.stack(places, axis=1), np.broadcast_to(rows, shape)), axis=2)
        self._of_layer: list[npt.NDArray[np.int64]] = list(np.ascontiguousarray(joined))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
        window: int | None, scaling: float, softcap: float | None,
    ) -> None:  # fmt: skip
        """Keeps the new keys and values of the pieces in one layer, and computes the attention of their rows.

        Args:
            layer: the number of the layer.
            query: float32, shape (num_heads, num_rows, head_dim), with the rows of the whole step.
            key, value: float32, shape (num_kv_heads, num_rows, head_dim).
            out: shape (num_rows, num_heads, head_dim); the rows of the pieces are written.
            window, scaling, softcap: as in `kernels.attend`.

        Raises:
            ConfigurationError: the model's layers have other shapes than the model's config states.
        """
        layout = self._layout
        expected = (layout.num_kv_heads, query.shape[1], layout.head_dim)
        if layer >= len(self._of_layer) or key.shape != expected or value.shape != expected:
            raise ConfigurationError(
                "the engine does not serve this model: its layers have other heads than its config says"
            )
        keys, values = (kernels.NewVectors(*as_kept(each, layout.dtype)) for each in (key, value))
        kernels.attend(self._of_layer[layer], query, keys, values, out, window=window, scaling=scaling, softcap=softcap)


def split(pieces: Sequence[Piece], cpu_dtype: torch.dtype | None) -> tuple[FewRows | None, list[tuple[int, Piece]]]:
    """Divides the pieces of a step into those for the compiled attention and all others.

    Args:
        pieces: the pieces of the step, in the order of its rows.
        cpu_dtype: the dtype of the rows; None if the rows are not on the CPU.

    Returns:
        The pieces of few rows (None if there are none), and the first row of each other piece with the piece.
    """
    few: list[tuple[int, Piece]] = []
    others: list[tuple[int, Piece]] = []
    begin = 0
    for piece in pieces:
        layout = piece.kv.layout
        is_few = 0 < piece.num_rows - piece.num_unseen <= kernels.MOST_ROWS
        if is_few and cpu_dtype == torch.float32 and kernels.serves(layout.head_dim, layout.dtype):
            few.append((begin + piece.num_unseen, piece))
        else:
            others.append((begin, piece))
        begin += piece.num_rows
    return FewRows(few) if few else None, others
