"""Two providers that do not collude: one gets the rows minus a pseudorandom share, the other the share's seed.

Exact: no error, no hints, no pool. The first provider sees x̃ − expand(p) mod 2^32, which is uniform to whoever does not
know p; the second sees p, fresh 32 bytes that have nothing to do with x̃. Assumption: the two do not collude, and
AES-256-CTR is a pseudorandom generator. Source: DESIGN.md, section 4 (additive secret sharing).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from noise.scheme import EffectPath, GroupSpec, Masked, Message, decode_rows, encode_rows
from wire.errors import MaskError
from wire.frame import Arithmetic, Call, Direction, Purpose
from wire.ring.seeded_rows import SeededRows


class Shares:
    """Additive shares over two providers, on ring arithmetic."""

    name = "shares"
    arithmetic = Arithmetic.RING

    def __init__(self, fresh_seed: Callable[[], bytes], on_close: Callable[[], None] = lambda: None) -> None:
        """Args.

        fresh_seed: 32 bytes from the operating system, counted by the ledger, never the same twice.
        on_close: closes the ledger.
        """
        self._fresh_seed, self._on_close = fresh_seed, on_close
        self._closed = False

    def bind(self, effect_path: EffectPath) -> None:
        """Needs no effects of its own: the second provider's reply is the effect."""

    def mask(self, group: GroupSpec, direction: Direction, rows: torch.Tensor) -> Masked:
        """Splits the rows; see `MaskScheme.mask`."""
        if self._closed:
            raise MaskError("this mask was closed")
        encoded, scales = encode_rows(group, direction, rows)  # raises before a seed is spent
        share = SeededRows(self._fresh_seed(), 0, rows.shape[0])
        hidden = encoded.to("cpu") - share.expand(rows.shape[1])

        def unmask(replies: Sequence[torch.Tensor]) -> torch.Tensor:
            return decode_rows(group, direction, replies[0] + replies[1], scales)

        return Masked(
            (
                Message(Call(group.id, direction, Arithmetic.RING), hidden, 0),
                Message(Call(group.id, direction, Arithmetic.RING, Purpose.HINT), share, 1),
            ),
            unmask,
        )

    def mask_row(self, group: GroupSpec, direction: Direction, row: torch.Tensor) -> None:
        """See `MaskScheme.mask_row`: there is none here."""

    def describe(self) -> Mapping[str, str]:
        """Scheme and assumption."""
        return {
            "scheme": "shares: rows minus a pseudorandom share to one provider, the share's seed to another",
            "assumption": "the two providers do not collude; AES-256-CTR is a pseudorandom generator",
            "bits": "256-bit keys",
            "secrets": "a seed of its own for every call, counted by the ledger: no budget to spend",
            "storage": "none: neither hints nor masks are kept",
        }

    def close(self) -> None:
        """Hands out nothing from now on."""
        self._closed = True
        self._on_close()
