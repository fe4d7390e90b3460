"""This module computes the attention of all requests that have few rows in a step, layer by layer in one call each.

A `RequestRows` says which rows of a step belong to a request. An answer that is being written has one row in each step.
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
class RequestRows:
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
    """Holds the parts of few rows of one step."""

    def __init__(self, parts: Sequence[tuple[int, RequestRows]]) -> None:
        """Makes room for the new tokens of all parts in all layers.

        Args:
            parts: for each part, the step's row that is the part's first row after padding, and the part; at least
                one. Rows of padding are not computed.
        """
        self._layout: KvLayout = parts[0][1].kv.layout
        self._parts = parts  # Their keys and values must live as long as this object, which holds their addresses.
        counts = [part.num_rows - part.num_unseen for _, part in parts]
        places = [part.kv.describe(part.position, count) for (_, part), count in zip(parts, counts, strict=True)]
        rows = np.array([(first, count) for (first, _), count in zip(parts, counts, strict=True)], dtype=np.int64)
        shape = (len(places[0]), *rows.shape)
        joined = np.concatenate((np.stack(places, axis=1), np.broadcast_to(rows, shape)), axis=2)
        self._of_layer: list[npt.NDArray[np.int64]] = list(np.ascontiguousarray(joined))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
        window: int | None, scaling: float, softcap: float | None,
    ) -> None:  # fmt: skip
        """Keeps the new keys and values of the parts in one layer, and computes the attention of their rows.

        Args:
            layer: the number of the layer.
            query: float32, shape (num_heads, num_rows, head_dim), with the rows of the whole step.
            key, value: float32, shape (num_kv_heads, num_rows, head_dim).
            out: shape (num_rows, num_heads, head_dim); the rows of the parts are written.
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


def split(
    parts: Sequence[RequestRows], cpu_dtype: torch.dtype | None
) -> tuple[FewRows | None, list[tuple[int, RequestRows]]]:
    """Divides the parts of a step into those for the compiled attention and all others.

    Args:
        parts: the parts of the step, in the order of its rows.
        cpu_dtype: the dtype of the rows; None if the rows are not on the CPU.

    Returns:
        The parts of few rows (None if there are none), and the first row of each other part with the part.
    """
    few: list[tuple[int, RequestRows]] = []
    others: list[tuple[int, RequestRows]] = []
    begin = 0
    for part in parts:
        layout = part.kv.layout
        is_few = 0 < part.num_rows - part.num_unseen <= kernels.MOST_ROWS
        if is_few and cpu_dtype == torch.float32 and kernels.serves(layout.head_dim, layout.dtype):
            few.append((begin + part.num_unseen, part))
        else:
            others.append((begin, part))
        begin += part.num_rows
    return FewRows(few) if few else None, others
