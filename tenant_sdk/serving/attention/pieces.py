"""This module describes which rows of a step belong to which request."""

from __future__ import annotations

from dataclasses import dataclass, field

from tenant_sdk.serving.kv import RequestKv


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
