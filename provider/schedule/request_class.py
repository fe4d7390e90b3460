"""Kinds of work, inferred from what a tenant does: the provider is not told, and need not believe it."""

from __future__ import annotations

import functools
from enum import IntEnum

from wire.call import Call, Direction, Purpose

DECODE_ROWS = 16
"""Most rows of a forward request that counts as decode; larger ones are prefill, or fine-tuning if the tenant sends
gradients."""
DECODE_IN_FLIGHT = 3
"""Most requests of a tenant that count as decode at a time, on all its streams. A tenant that decodes asks for one
layer after the other; small requests beyond these are no decoding, and must not delay tenants that decode."""


class RequestClass(IntEnum):
    """The kinds of work, the most urgent first. The operator may forbid a tenant some of them."""

    DECODE = 0
    PREFILL = 1
    FINETUNE = 2


def class_of(call: Call, num_rows: int, num_decode: int, is_training: bool) -> RequestClass:
    """Returns the class that a request counts as.

    Args:
        call: what it asks for.
        num_rows: its rows.
        num_decode: how many of the tenant's requests in flight count as decode.
        is_training: whether the tenant sent gradients lately.
    """
    if call.direction is Direction.BACKWARD:
        return RequestClass.FINETUNE
    if num_rows <= DECODE_ROWS:
        return RequestClass.DECODE if num_decode < DECODE_IN_FLIGHT else RequestClass.PREFILL
    # A few rows of a seed are a share of a decode step; many are the hints of a mask.
    return RequestClass.FINETUNE if is_training or call.purpose is Purpose.HINT else RequestClass.PREFILL


def allowed_by(call: Call, request_class: RequestClass, num_rows: int) -> frozenset[RequestClass]:
    """Returns the classes of which a tenant must have one to send such a request.

    Fine-tuning begins with forward passes, and the default mask of any work with hints: a tenant that may do the one
    may send the other. A tenant that may decode may also send requests of as few rows that count as prefill beside
    others.
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
