"""Makes payloads from rows or from seeds."""

from __future__ import annotations

from wire.payload import Payload, RowsPayload, SeedPayload
from wire.ring.seeded_rows import Rows, SeededRows


def payload_of(rows: Rows, cols: int) -> Payload:
    """Returns the payload for rows, or for a seed that stands for rows of `cols` numbers."""
    return SeedPayload(rows, cols) if isinstance(rows, SeededRows) else RowsPayload(rows)
