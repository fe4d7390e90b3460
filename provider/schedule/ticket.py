"""Defines a request as the scheduler sees it: counts and times, without the rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from provider.schedule.request_class import RequestClass
from wire.frame import Call


@dataclass(slots=True, eq=False)
class Ticket:
    """Describes one queued request to the scheduler.

    Attributes:
        tenant: the name of the tenant that pays for the request.
        call: the call; requests of one call can share a product.
        num_rows: the number of rows of the whole request; at least 1 in a request that is queued.
        request_class: the class of work that the request counts as.
        arrived_s, expires_s: times of arrival and deadline, in seconds of the scheduler's clock.
        due_s: the time until which the request may be held; set by the scheduler.
        rows_taken: the number of rows that are in batches so far.
        job: the executor's job of this request; the scheduler does not use it.
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
        """Returns the number of rows that are in no batch yet."""
        return self.num_rows - self.rows_taken


@dataclass(frozen=True, slots=True)
class Piece:
    """Describes a part of one request: `num_rows` rows, of which the first is row `first_row`."""

    ticket: Ticket
    first_row: int
    num_rows: int

    @property
    def is_last(self) -> bool:
        """Returns whether this piece ends with the last row of its request."""
        return self.first_row + self.num_rows == self.ticket.num_rows


@dataclass(frozen=True, slots=True)
class Batch:
    """Holds the pieces (parts of requests of the same call) that one product computes, in the order of its rows."""

    call: Call
    pieces: tuple[Piece, ...]

    @property
    def num_rows(self) -> int:
        """Returns the number of rows over all pieces."""
        return sum(piece.num_rows for piece in self.pieces)
