"""A request as the scheduler sees it: numbers, no rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from provider.schedule.request_class import RequestClass
from wire.frame import Call


@dataclass(slots=True, eq=False)
class Ticket:
    """One request in the queue.

    Attributes:
        tenant: the tenant whose turn it uses.
        call: its lane: requests of one call can share a product.
        num_rows: the rows of the whole request, at least one.
        request_class: the kind of work that it counts as.
        arrived_s, expires_s: times on the scheduler's clock.
        due_s: when it is held no longer; the scheduler sets it.
        rows_taken: how many rows batches have taken so far.
        job: the executor's own; the scheduler does not look at it.
    """

    tenant: str
    call: Call
    num_rows: int
    request_class: RequestClass
    arrived_s: float
    expires_s: float = float("inf")
    due_s: float = 0.0
    rows_taken: int = 0
    job: object = field(default=None, repr=False)

    @property
    def rows_left(self) -> int:
        """Returns how many rows no batch has taken."""
        return self.num_rows - self.rows_taken


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows first_row to first_row + num_rows of one request."""

    ticket: Ticket
    first_row: int
    num_rows: int

    @property
    def is_last(self) -> bool:
        """Tells whether the request is done after this piece; pieces of one request run in order."""
        return self.first_row + self.num_rows == self.ticket.num_rows


@dataclass(frozen=True, slots=True)
class Batch:
    """What one product computes: pieces of one lane, in the order of their rows."""

    call: Call
    pieces: tuple[Piece, ...]

    @property
    def num_rows(self) -> int:
        """Returns the number of rows over all pieces."""
        return sum(piece.num_rows for piece in self.pieces)
