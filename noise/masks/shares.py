"""This module splits rows over two providers that do not collude. One provider gets the rows minus a pseudorandom
share, the other gets the share's seed.

The mask adds no noise to the result, and needs no hint and no pool. The first provider sees x̃ − expand(p) mod 2^32,
which looks uniform to a party that does not know the seed p. The second provider sees p, 32 fresh bytes that are
independent of x̃, the encoded rows. Assumption: the two do not collude, and AES-256-CTR is a pseudorandom generator.
This is additive secret sharing (docs/masks.md, "shares").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from noise.scheme import (
    EffectPath,
    GroupSpec,
    Masked,
    Message,
    decode_rows,
    encode_for_mask,
)
from noise.staging import on_host
from wire.errors import MaskError
from wire.frame import Arithmetic, Call, Direction, Purpose
from wire.payload import RowsPayload, SeedPayload
from wire.ring.seeded_rows import SeededRows
from wire.ring.widths import rounded


class Shares:
    """Splits rows into additive shares for two providers, in ring arithmetic."""

    name = "shares"
    arithmetic = Arithmetic.RING

    def __init__(
        self, fresh_seed: Callable[[], bytes], on_close: Callable[[], None] = lambda: None, precision: str = "exact"
    ) -> None:
        """Makes a mask that has not drawn any seed yet.

        Args:
            fresh_seed: returns 32 bytes from the operating system, counted by the ledger, never the same twice.
            on_close: called by `close`; closes the ledger.
            precision: how many bits cross of a row that goes to the first provider, and of its reply; one of
                `noise.options.PRECISIONS`. The row is uniform mod 2^32, so rounding it shows nothing more. What the
                second provider multiplies is a seed's rows, of which all bits count.
        """
        self.precision = precision
        self._fresh_seed, self._on_close = fresh_seed, on_close
        self._closed = False

    def bind(self, effect_path: EffectPath) -> None:
        """Does nothing, since the second provider's reply is the effect."""

    def mask(self, group: GroupSpec, direction: Direction, rows: torch.Tensor) -> Masked:
        """Splits the rows into two shares, one for each provider; see `MaskScheme.mask`."""
        if self._closed:
            raise MaskError("this mask was closed")
        # This raises an error before a seed is spent.
        call, encoded, scales = encode_for_mask(group, direction, rows, self.precision)
        share = SeededRows(self._fresh_seed(), 0, rows.shape[0])
        with on_host(encoded) as here:
            hidden = rounded(here - share.expand(rows.shape[1]), call.bits)

        def unmask(replies: Sequence[torch.Tensor]) -> torch.Tensor:
            return decode_rows(group, direction, replies[0] + replies[1], scales)

        return Masked(
            (
                Message(call, RowsPayload(hidden, is_masked=True), 0),
                Message(Call(group.id, direction, Arithmetic.RING, Purpose.HINT), SeedPayload(share, rows.shape[1]), 1),
            ),
            unmask,
        )

    def describe(self) -> Mapping[str, str]:
        return {
            "scheme": "shares: rows minus a pseudorandom share to one provider, the share's seed to another",
            "assumption": "the two providers do not collude; AES-256-CTR is a pseudorandom generator",
            "bits": "256-bit keys",
            "secrets": "a seed of its own for every call, counted by the ledger: no budget to spend",
            "storage": "none: neither hints nor masks are kept",
        }

    def close(self) -> None:
        """Makes `mask` raise MaskError from now on, and closes the ledger."""
        self._closed = True
        self._on_close()
