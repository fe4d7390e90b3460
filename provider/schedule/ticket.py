"""Defines a request as the scheduler sees it, by counts and times and without the rows, and infers its class of work.

The class (decode, prefill or fine-tuning) is inferred from what the tenant sends, since a tenant could claim a false
class.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from enum import IntEnum

from wire.call import Call, Direction, Purpose

DECODE_ROWS = 16
"""The most rows of a forward request that counts as decode. Larger requests are prefill, or fine-tuning if the tenant
sends gradients."""
DECODE_IN_FLIGHT = 3
"""The most requests of one tenant that count as decode at a time, over all its streams. While a tenant decodes, it
calls one layer after the other. Further small requests are not decoding, and must not delay tenants that decode."""


class RequestClass(IntEnum):
    """Lists the classes of work, the most urgent first. The operator may forbid a tenant some classes."""

    DECODE = 0
    PREFILL = 1
    FINETUNE = 2


def class_of(call: Call, num_rows: int, num_decode: int, is_training: bool) -> RequestClass:
    """Returns the class of work (decode, prefill or fine-tuning) as which a request counts.

    Args:
        call: the call of the request.
        num_rows: the request's number of rows.
        num_decode: how many of the tenant's requests in flight count as decode.
        is_training: whether the tenant sent gradients within the last minute.
    """
    if call.direction is Direction.BACKWARD:
        return RequestClass.FINETUNE
    if num_rows <= DECODE_ROWS:
        return RequestClass.DECODE if num_decode < DECODE_IN_FLIGHT else RequestClass.PREFILL
    # A seed of few rows, handled above, is one of a decode step's two shares; a seed of many rows is for hints.
    return RequestClass.FINETUNE if is_training or call.purpose is Purpose.HINT else RequestClass.PREFILL


def allowed_by(call: Call, request_class: RequestClass, num_rows: int) -> frozenset[RequestClass]:
    """Returns the classes that permit a request; the tenant must be allowed at least one of them.

    Forward passes are part of fine-tuning, so a tenant that may fine-tune may send forward requests. The default mask
    needs hints for any work, so every class permits hints. A small request may count as prefill only because other
    requests are in flight, so a tenant that may decode may send small requests of class prefill.
    """
    return _allowed_by(call.direction, call.purpose, request_class, num_rows <= DECODE_ROWS)


@functools.cache
def _allowed_by(
    direction: Direction, purpose: Purpose, request_class: RequestClass, is_few: bool
) -> frozenset[RequestClass]:
    if direction is Direction.BACKWARD:
        return frozenset({RequestClass.FINETUNE})
    if purpose is Purpose.HINT:
        return frozenset(RequestClass)
    decode = {RequestClass.DECODE} if is_few else set()
    return frozenset({request_class, RequestClass.FINETUNE, *decode})


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
        request: the request that the ticket stands for; the scheduler does not use it.
    """

    tenant: str
    call: Call
    num_rows: int
    request_class: RequestClass
    arrived_s: float
    expires_s: float = float("inf")
    due_s: float = 0.0
    rows_taken: int = 0
    request: object = field(default=None, repr=False)

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
        return self.first_row + self.num_rows == self.ticket.num_rows


@dataclass(frozen=True, slots=True)
class Batch:
    """Holds the pieces (parts of requests of the same call) that one product computes, in the order of its rows."""

    call: Call
    pieces: tuple[Piece, ...]

    @property
    def num_rows(self) -> int:
        return sum(piece.num_rows for piece in self.pieces)
