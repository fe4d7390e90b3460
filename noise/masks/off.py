"""This module sends rows without a mask, for comparison and for a trusted provider. It hides nothing, and its
description says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from noise.scheme import EffectPath, GroupSpec, Masked, Message, RowEncoder, decode_rows, encode_rows
from wire.errors import NotFinite
from wire.frame import Arithmetic, Call, Direction
from wire.payload import RowsPayload

READABLE = "ROWS GO READABLE"
"""How each text begins that says so: in a warning, in the lines of `explain` and on the page of an endpoint."""
HIDES_NOTHING = (
    "mask='off' hides nothing: the provider reads every activation and gradient, and what follows from them, such as "
    "texts and adapters. lattice (the default), pad and shares hide rows"
)


class Off:
    """Sends rows unmasked: quantised to the ring, or as float32."""

    name = "off"
    precision = "exact"

    def __init__(self, arithmetic: Arithmetic) -> None:
        """Chooses the arithmetic: RING (int32 rows, int8 weights, exact) or FLOAT."""
        self.arithmetic = arithmetic
        self._row_encoder = RowEncoder()

    def bind(self, effect_path: EffectPath) -> None:
        """Does nothing, since there are no effects."""

    def mask(self, group: GroupSpec, direction: Direction, rows: torch.Tensor) -> Masked:
        """Wraps the rows into a message without hiding them; see `MaskScheme.mask`."""
        call = Call(group.id, direction, self.arithmetic)
        if self.arithmetic is Arithmetic.FLOAT:
            check_finite(rows)
            # The reply may be read-only, so it is cloned.
            return Masked((Message(call, RowsPayload(rows)),), lambda replies: replies[0].clone())
        row = self._row_encoder.encode(group, direction, rows)
        if row is not None:
            return Masked((Message(call, row.payload),), lambda replies: row.codec.decode(replies[0], row.scale))
        encoded, scales = encode_rows(group, direction, rows)

        def unmask(replies: Sequence[torch.Tensor]) -> torch.Tensor:
            return decode_rows(group, direction, replies[0], scales)

        return Masked((Message(call, RowsPayload(encoded)),), unmask)

    def describe(self) -> Mapping[str, str]:
        return {"scheme": "off", "assumption": "the provider is trusted: it sees every activation and gradient"}

    def close(self) -> None:
        """Does nothing, since there is nothing to drop."""


def check_finite(rows: torch.Tensor) -> None:
    """Raises NotFinite if a value is NaN or infinite. Callers must call this before anything is sent."""
    # `aminmax` finds the smallest and the largest value in one pass, and both are NaN if any value is.
    if rows.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(rows))).all()):
        raise NotFinite("a row holds NaN or infinity: nothing was sent")
