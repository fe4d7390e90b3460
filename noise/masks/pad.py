"""This module masks rows with one-time pads. The tenant computes the pads' effect itself, ahead of use, from its own
copy of the public weights.

Guarantees: the provider sees x̃ + n mod 2^32, the encoded row plus a pad row n. Pad rows come from AES-256-CTR under a
separate key for every block, and each row is used once. Nothing is asked of the provider in advance, and no precision
is lost to noise. Assumption: AES-256-CTR is a pseudorandom generator. The mask is for tenants that hold the weights and
have no accelerator (docs/masks.md, "pad").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from noise.blocks.pool import DEFAULT_BYTES, Block, MaskPool
from noise.blocks.row_file import RowFile
from noise.blocks.slots import Slots
from noise.scheme import (
    EffectPath,
    GroupSpec,
    Masked,
    Message,
    WeightOf,
    decode_rows,
    encode_for_mask,
)
from noise.staging import on_device, on_host
from wire.errors import ConfigurationError
from wire.frame import Arithmetic, Direction
from wire.payload import RowsPayload
from wire.ring import coding
from wire.ring.seeded_rows import SeededRows
from wire.ring.widths import rounded

BLOCK_ROWS = 256
"""The rows under one key: enough for an efficient product, and not many more than a short answer needs."""
LEAST_ROWS = 16
"""The fewest rows that are worth making at a time. Fewer than BLOCK_ROWS are made if the model is so wide that the pool
does not hold two blocks for every layer."""


class Pad:
    """Masks rows with one-time pads in ring arithmetic."""

    name = "pad"
    arithmetic = Arithmetic.RING

    def __init__(
        self,
        weight_of: WeightOf,
        fresh_seed: Callable[[], bytes],
        pool_bytes: int = DEFAULT_BYTES,
        background: bool = True,
        on_close: Callable[[], None] = lambda: None,
        features: int = 0,
        file: RowFile | None = None,
        precision: str = "exact",
    ) -> None:
        """Makes a mask whose pool holds no pads yet.

        Args:
            weight_of: returns the tenant's own quantised weight of a group.
            fresh_seed: returns 32 bytes from the operating system, counted by the ledger, never the same twice.
            pool_bytes: the most bytes of pads and effects made ahead.
            background: whether a worker thread makes them.
            on_close: called by `close`; closes the ledger.
            features, file: see `MaskPool`.
            precision: how many bits of a masked row and of its reply cross; one of `noise.options.PRECISIONS`. Rounding
                a number that is uniform mod 2^32 shows nothing that the number does not show.
        """
        self.precision = precision
        self._weight_of, self._fresh_seed, self._on_close = weight_of, fresh_seed, on_close
        self.pool = MaskPool(self._make, BLOCK_ROWS, pool_bytes, background, LEAST_ROWS, features, file=file)

    def bind(self, effect_path: EffectPath) -> None:
        """Does nothing, since this mask needs no effects from the provider."""

    def mask(self, group: GroupSpec, direction: Direction, rows: torch.Tensor) -> Masked:
        """Adds fresh pad rows; see `MaskScheme.mask`."""
        # This raises an error before a pad row is used up.
        call, encoded, scales = encode_for_mask(group, direction, rows, self.precision)
        pad, effect = self.pool.take(group, direction, rows.shape[0])

        def unmask(replies: Sequence[torch.Tensor]) -> torch.Tensor:
            with on_device(effect, replies[0].device) as there:
                return decode_rows(group, direction, replies[0], scales, there)

        with on_host(encoded) as here:
            return Masked((Message(call, RowsPayload(rounded(here + pad, call.bits), is_masked=True)),), unmask)

    def _make(self, group: GroupSpec, direction: Direction, num_rows: int) -> Sequence[Block]:
        weight = self._weight_of(group.id)
        if weight.shape != (group.in_features, group.out_features):
            raise ConfigurationError(f"the tenant's own weight of group {group.id} does not fit the provider's")
        matrix = weight if direction is Direction.FORWARD else weight.t()
        blocks: list[Block] = []
        piece, left = self.pool.piece_rows, num_rows
        while left > 0:
            self.pool.check_open()
            count = piece if left > piece // 2 else left
            left -= count
            pad = SeededRows(self._fresh_seed(), 0, count).expand(matrix.shape[0])
            blocks.append(Block(pad, coding.product(pad, matrix), Slots(count)))
        return blocks

    def prepare(self, group: GroupSpec, direction: Direction, num_rows: int) -> None:
        """Makes rows before they are needed, or none if they do not fit into the pool; see `MaskPool.prepare`."""
        self.pool.prepare(group, direction, num_rows)

    def describe(self) -> Mapping[str, str]:
        return {
            "scheme": "pad: a one-time pad on every row, its effect computed by the tenant",
            "assumption": "AES-256-CTR, keyed by the operating system for each block, is a pseudorandom generator",
            "bits": "256-bit keys",
            "secrets": f"a key of its own for at most {BLOCK_ROWS} rows, counted by the ledger: no budget to spend",
            "pool": self.pool.describe("pads"),
        }

    def close(self) -> None:
        """Drops all mask rows that are kept in memory, and closes the ledger."""
        self.pool.close()
        self._on_close()
