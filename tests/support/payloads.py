"""Payloads of what a test wants to send, whichever kind of rows that is."""

from __future__ import annotations

from wire.payload import Payload, RowsPayload, SeedPayload
from wire.ring.seeded_rows import Rows, SeededRows


def payload_of(rows: Rows, cols: int) -> Payload:
    """Returns the payload of rows, or of a seed whose rows have `cols` numbers each."""
    return SeedPayload(rows, cols) if isinstance(rows, SeededRows) else RowsPayload(rows)
